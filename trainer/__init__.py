"""The drafter trainer: trains a DFlash drafter against a frozen target, with or without specctl around it.

Read `train.py` first. What a run leaves behind is written by `report/` and `checkpoint.py` alone.
"""
