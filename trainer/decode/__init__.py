"""Decoding with a drafter: what it writes, whether it is what the target would have written, and how fast."""
