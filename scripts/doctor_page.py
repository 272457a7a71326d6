"""Writes the tables of docs/doctor.md: what the doctor looks at, and what it says of a target in each kind of trouble.

    python scripts/doctor_page.py [--check]

The first is made of the checks themselves, the second by having them examine the patients of tests/patients.py, so that
both say what the program says. `--check` changes nothing and exits 1 where the page is not what it would be.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.doctor.check import RUNGS, Check  # noqa: E402
from orchestrator.doctor.checks import CHECKS  # noqa: E402
from orchestrator.doctor.reach import ASKS  # noqa: E402
from tests.patients import PATIENTS  # noqa: E402

PAGE = ROOT / "docs" / "doctor.md"
BEGIN, END = "<!-- checks: written by scripts/doctor_page.py -->\n", "<!-- end of checks -->\n"


def tables() -> str:
    """The page's part between the marks."""
    looks = ["| check | what is looked at | when |", "|---|---|---|"]
    looks += [f"| {rung} | {ASKS[rung]} | on the way |" for rung in RUNGS]
    looks += [f"| {check.name} | {check.asks} | {_when(check)} |" for check in CHECKS]
    found = ["| check | | what it says | what mends it |", "|---|---|---|---|"]
    for patient in PATIENTS:
        for check, outcome in patient.found():
            if check == patient.check and outcome.status in ("fail", "warn"):
                command, _, more = outcome.mend.partition("   # ")
                mend = f"`{command}`{', ' * bool(more)}{more}" if command.startswith(("ssh ", "specctl ")) else command
                found.append(f"| {check} | {outcome.status} | {_cell(outcome.what)} | {_cell(mend)} |")
    return "\n".join(["## What is looked at", "", *looks, "", "## What it says", "", *dict.fromkeys(found)])


def _when(check: Check) -> str:
    return "not with `--quick`" if check.full else "also before a launch" if check.launch else "always"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(check: bool) -> int:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{tables()}\n\n{END}{after}"
    if made == page:
        return 0
    if check:
        print("docs/doctor.md does not say what the checks do: python scripts/doctor_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
