"""`python -m trainer plan`: what a run would compile and how much memory it would take, found without running it."""
