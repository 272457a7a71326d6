"""What `specctl doctor` looks at, and what it says of it.

`script.py` is what runs there (sh, and nothing else), `report.py` reads what it printed, `hands.py` words what a person
can type, and the checks (`reach.py`, `machine.py`, `gpus.py`) judge: each is a function of what has been seen, and
touches neither clock nor file nor process. `verbs/doctor.py` goes there and asks.
"""
