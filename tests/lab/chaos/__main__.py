"""The command line of chaos: lanes side by side, and the table of what was counted."""

from __future__ import annotations

import argparse
import secrets
import sys
from functools import partial
from pathlib import Path

from tests.lab.chaos.lane import Lane
from tests.lab.chaos.ledger import Ledger
from tests.lab.chaos.pool import Pool
from tests.lab.chaos.steps import Actor, Crew
from tests.lab.lab import LabUnavailable, setup


def run(*, seed: int, launches: int, lanes: int, transcript: Path | None = None) -> Ledger:
    """Does the sequences of one seed, or as much as there is time for until Ctrl-C; whatever breaks in a lane itself is
    raised."""
    ledger = Ledger(seed=seed)

    def drive(number: int, pool: Pool) -> None:
        share = launches // lanes + (number < launches % lanes)
        with Lane(number, seed=seed, pool=pool, ledger=ledger, transcript=transcript) as lane:
            Actor(lane).episodes(share)

    with Pool() as pool, Crew() as crew:
        for number in range(lanes):
            crew.do(partial(drive, number, pool))
        try:
            crew.wait()
        except KeyboardInterrupt:
            ledger.enough.set()
            print("breaking off: the table comes after the steps under way", file=sys.stderr, flush=True)
    return ledger


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="Launches, faults and verbs by a seed, and an oracle.")
    parser.add_argument("--seed", type=int, default=None, help="which sequence; another every time if left out")
    parser.add_argument("--launches", type=int, default=100)
    parser.add_argument("--lanes", type=int, default=4, help="nodes side by side; a seed's sequence depends on it")
    parser.add_argument("--transcript", type=Path, default=None, metavar="FILE", help="every step, as it is done")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    print(f"seed {seed}, {args.launches} launches in {args.lanes} lanes", file=sys.stderr, flush=True)
    try:
        setup()
        ledger = run(seed=seed, launches=args.launches, lanes=args.lanes, transcript=args.transcript)
    except LabUnavailable as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    for text in ledger.said:
        print(f"{text}\n", file=sys.stderr)
    print(ledger.table())
    if ledger.said:
        print(f"again: make chaos SEED={seed} LAUNCHES={args.launches} LANES={args.lanes}", file=sys.stderr)
    return 1 if ledger.said else 0


if __name__ == "__main__":
    sys.exit(main())
