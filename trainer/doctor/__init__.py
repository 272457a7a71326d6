"""`python -m trainer doctor`: what would spoil a run, found before it begins."""
