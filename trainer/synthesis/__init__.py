"""Training data that the target has written itself: a drafter has to know what its target says, not what others do."""
