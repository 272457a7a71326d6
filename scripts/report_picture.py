"""Makes the pictures of docs/report.md: two real trainings of the demo configuration on one page, one still at work.

    python scripts/report_picture.py docs/pictures

It launches on `local` with a workdir and an index of its own, and takes some minutes on two cores. The browser is the
one that the tests drive (tests/browser.py).
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402

STEPS, SEEN_AT = 60, 40
"""The second run is reported at the latter."""
RATES = {"demo": "1e-3", "slower": "3e-4"}
DESK, PHONE = (1200, 1330), (390, 844)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as home:
        os.environ["XDG_STATE_HOME"] = home
        page = Path(home) / "report.html"
        page.write_text(report(Path(home)), encoding="utf-8")
        browser = Browser()
        tab = browser.open(page.as_uri(), width=DESK[0], height=DESK[1])
        print(tab.picture(folder / "report.png"))
        phone = browser.open(page.as_uri(), width=PHONE[0], height=PHONE[1], phone=True, dark=True)
        left, top, width, height = phone.box(".lanes .plot svg")
        phone.touch([(left + width * 0.8, top + height / 2)])
        print(phone.picture(folder / "report-phone.png"))
        browser.close()


def report(home: Path) -> str:
    """The page about two runs that were trained for it."""
    from orchestrator import plan as planning
    from orchestrator.fleet import Fleet
    from orchestrator.inventory import parse_inventory
    from orchestrator.render import launch as show_launch
    from orchestrator.render import report as show_report
    from orchestrator.verbs import launch, stop
    from orchestrator.verbs import report as verb

    fleet = Fleet(parse_inventory(f"targets:\n  gpu1: {{workdir: {home}/w}}\n"))
    demo = (ROOT / "configs/smollm2-cpu.yaml").read_text(encoding="utf-8")
    ids = []
    for name, rate in RATES.items():
        config = home / f"{name}.yaml"
        config.write_text(re.sub(r"(?m)^steps: .*$", f"steps: {STEPS}", demo).replace("lr: 1e-3", f"lr: {rate}"))
        request = planning.Request(target="gpu1", config=config, command=[], source=ROOT, name=name)
        plan = planning.plan(request, fleet.inventory)
        launch.run(plan, fleet, show_launch.Progress(Console(file=io.StringIO()), plan))
        ids.append(plan.spec.run_id)
        wait(fleet, plan.spec.run_id, step=SEEN_AT if len(ids) == len(RATES) else STEPS)
    text = show_report.page(verb.run(fleet, ids, list(verb.METRICS)), program="specctl report")
    for run_id in ids:
        stop.run(fleet, run_id, grace_s=60.0, now=False)
    fleet.close()
    return text


def wait(fleet: Any, run_id: str, *, step: int) -> None:
    """Until it has come so far, or has ended; a run that has all its steps is waited for until it has."""
    from orchestrator.verbs import status

    while True:
        verdict = status.run(fleet, [run_id], everything=True).runs[0].verdict
        if not verdict.live or (step < STEPS and (verdict.step or 0) >= step):
            return
        time.sleep(1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
