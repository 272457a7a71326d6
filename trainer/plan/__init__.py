"""`python -m trainer plan`: how much memory and arithmetic a run would take, found without running it."""
