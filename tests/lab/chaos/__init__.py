"""Chaos: seeded sequences of verbs and faults in the lab, and an oracle that looks from outside.

A lane (`lane.py`) has two containers, two laptops (`laptop.py`) and a link of its own; by its seed it is chosen what is
done next there (`steps.py`, with `verbs.py`, `lines.py`, `faults.py`). `act.py` is the program that is launched, in
many kinds (`kinds.py`); it leaves a witness of its own. `observer.py` sees processes and files from the host, never
through specctl. `oracle.py` is pure: what was said, and what was true before and after, in; lies out; `court.py` brings
each answer there, `ledger.py` counts. `pool.py` runs the real command line, one process a verb, forked from one that
has imported it (`forkserver.py`).

    python -m tests.lab.chaos --seed 1 --launches 50
"""
