"""Makes the pictures of README and docs from real runs: launches of the demo configuration and of failing programs as
rich draws them, and then the story of docs/did-it-work.md, typed into a terminal.

    python scripts/pictures.py docs/pictures

It launches on this machine with a workdir and an index of its own, and stops what it launched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab.typed import BLOCK, commands  # noqa: E402
from tests.terminal import Typed  # noqa: E402

if TYPE_CHECKING:
    from orchestrator.fleet import Fleet

WIDTH, STATUS_WIDTH, DOCTOR_WIDTH = 118, 132, 136
MOVES = re.compile(r"\x1b(?:\[[0-9;?>]*[A-Za-ln-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78])")
"""What a terminal is told beside colours."""
LAUNCH = "specctl launch local --config configs/smollm2-cpu.yaml"


def recorder(command: str, width: int = WIDTH) -> Console:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(f"[bold green]$[/] [bold]{command}[/]")
    return console


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as home:
        os.environ["XDG_STATE_HOME"] = home
        from orchestrator import plan as planning
        from orchestrator.fleet import Fleet
        from orchestrator.inventory import parse_inventory
        from orchestrator.render import launch as show_launch
        from orchestrator.render import ls as show_ls
        from orchestrator.render import show as show_show
        from orchestrator.render import status as show_status
        from orchestrator.render import targets as show_targets
        from orchestrator.verbs import launch, ls, show, status, stop, targets

        fleet = Fleet(parse_inventory(f"targets:\n  local: {{workdir: {home}/w}}\n"))
        request = planning.Request(
            target="local", config=Path("configs/smollm2-cpu.yaml"), command=[], source=Path.cwd(),
            note="first light",
        )  # fmt: skip
        plan = planning.plan(request, fleet.inventory)
        picture = recorder(LAUNCH)
        with show_launch.Progress(picture, plan, live=False) as progress:
            result = launch.run(plan, fleet, progress)
        show_launch.show_result(picture, result)
        save(picture, folder / "launch.svg", "specctl launch")

        dying = planning.Request(
            target="local", config=None, command=["/usr/bin/python3", "one_thread_dies.py"],
            source=Path("tests/programs"),
        )  # fmt: skip
        picture = recorder("specctl launch local -- python one_thread_dies.py")
        dying_plan = planning.plan(dying, fleet.inventory)
        with show_launch.Progress(picture, dying_plan, live=False) as progress:
            dead = launch.run(dying_plan, fleet, progress)
        show_launch.show_result(picture, dead)
        save(picture, folder / "degraded.svg", "specctl launch: one of three workers dies")

        failing = planning.Request(
            target="local", config=None, command=["sh", "-c", "echo saved; exit 3"], name="eval", source=None
        )
        failing_plan = planning.plan(failing, fleet.inventory)
        launch.run(failing_plan, fleet, show_launch.Progress(Console(file=io.StringIO()), failing_plan))
        picture = recorder("specctl status", STATUS_WIDTH)
        show_status.show(picture, status.run(fleet, [], everything=False))
        save(picture, folder / "status.svg", "specctl status")
        picture = recorder("specctl show one-thread-dies")
        show_show.show(picture, show.run(fleet, dead.plan.spec.run_id), program="specctl")
        save(picture, folder / "show.svg", "specctl show")
        picture = recorder("specctl targets")
        show_targets.show(picture, targets.run(fleet, []), fleet.inventory)
        save(picture, folder / "targets.svg", "specctl targets")
        picture_of_top(fleet, folder)
        for run_id in (plan.spec.run_id, dead.plan.spec.run_id):
            stop.run(fleet, run_id, grace_s=60.0, now=False)
        picture = recorder("specctl ls", STATUS_WIDTH)
        show_ls.show(picture, ls.run(fleet, ls.Request()), ls.Request())
        save(picture, folder / "ls.svg", "specctl ls")
        fleet.close()
    picture_of_doctor(folder)


def picture_of_top(fleet: Fleet, folder: Path) -> None:
    """The whole screen, once the selected run has lost its worker, and its curve and its log are there."""
    from orchestrator.tui.app import Top
    from orchestrator.verbs import top

    board = top.Board(fleet, top.asks(fleet, [])[0], everything=False, every_s=1.0)
    app = Top(fleet, board, program="specctl", plain=False)
    app.title = "specctl top"

    async def draw() -> None:
        async with app.run_test(size=(STATUS_WIDTH, 36)) as pilot:
            give_up_at = time.monotonic() + 60
            while "<text" not in (svg := app.export_screenshot()) or not ("GONE" in svg and "worker=drafter" in svg):
                assert time.monotonic() < give_up_at, "the screen stays empty"
                await pilot.pause(1.0)
        write(svg, folder / "top.svg")

    asyncio.run(draw())
    board.stop()


HOSPITAL = """
defaults: {{ssh: pve, workdir: /home/train/specctl, user: train}}
ssh_config: {config}
targets:
  gpu1: {{vmid: 101, gpus: [0, 1]}}
  gpu2: {{vmid: 102}}
  gpu3: {{vmid: 103}}
"""
SICK = {
    101: "for n in nvidia0 nvidia1 nvidiactl; do mknod -m 666 /dev/$n c 1 3; done; rm /usr/bin/tmux",
    102: "ulimit -n 64; mount -t tmpfs -o size=64m shm /dev/shm",
    103: "true",
}
"""What is done to each container before it is examined. A lab has no GPUs: these are the null device's."""


def picture_of_doctor(folder: Path) -> None:
    """Containers of a real lab, each broken in its own way, as the doctor finds them."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from orchestrator.fleet import Fleet
    from orchestrator.inventory import read_inventory
    from orchestrator.render import doctor as show_doctor
    from orchestrator.verbs import doctor
    from tests.lab.lab import Lab, LabUnavailable

    try:
        with Lab() as lab, tempfile.TemporaryDirectory() as home:
            for vmid, harm in SICK.items():
                lab.container(vmid)
                lab.inside(vmid, ["sh", "-ec", f"useradd -m train; {harm}"], check=True)
            lab.nvidia_smi(101, "0, NVIDIA H200, 37, 1024, 143771\n1, NVIDIA H200, 0, 3, 143771")
            lab.freeze(103)
            hosts = Path(home, "hosts.yaml")
            hosts.write_text(HOSPITAL.format(config=lab.ssh_config))
            fleet = Fleet(read_inventory(hosts))
            picture = recorder("specctl doctor", DOCTOR_WIDTH)
            result = doctor.run(fleet, [])
            fleet.close()
            for view in result.views:  # where the lab's keys lie is of no interest
                view.found[:] = [
                    (check, dataclasses.replace(one, mend=one.mend.replace(f"-F {lab.ssh_config} ", "")))
                    for check, one in view.found
                ]
            show_doctor.show(picture, result, verbose=False)
            save(picture, folder / "doctor.svg", "specctl doctor")
    except LabUnavailable as error:
        print(f"no picture of the doctor: {error}", file=sys.stderr)


def story(folder: Path) -> None:
    """The launches of docs/did-it-work.md, in the order of the page, and then what each verb shows of them."""
    page = (ROOT / "docs" / "did-it-work.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as home:
        project = Path(home) / "project"
        project.mkdir()
        hosts = f"targets: {{gpu1: {{workdir: {home}/w, python: {sys.executable}}}}}\n"
        (Path(home) / "hosts.yaml").write_text(hosts)
        environ = {
            **{name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")},
            "XDG_STATE_HOME": f"{home}/state", "SPECCTL_INVENTORY": f"{home}/hosts.yaml", "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color", "COLORTERM": "truecolor",
        }  # fmt: skip
        specctl = [sys.executable, "-m", "orchestrator"]

        def typed(command: str, name: str, *, columns: int, rows: int) -> None:
            terminal = Typed([*specctl, *shlex.split(command)[1:]], cwd=project, environ=environ, columns=columns,
                             rows=rows)  # fmt: skip
            terminal.end()
            picture = recorder(command, columns)
            shown = MOVES.sub("", terminal.seen.decode()).replace("\r", "")
            picture.print(Text.from_ansi(shown.rstrip("\n")), soft_wrap=True)
            save(picture, folder / f"{name}.svg", command)

        for kind, what, language, text in BLOCK.findall(page):
            if kind == "file":
                (project / what).write_text(text)
            elif language == "console":
                for command in commands(text):
                    words = shlex.split(command.typed)
                    if words[1] == "launch" or "-f" in words:
                        subprocess.run([*specctl, *words[1:]], cwd=project, env=environ, check=False)
                    elif words[1] == "diff":
                        typed(command.typed, "diff", columns=92, rows=40)
        typed("specctl compare run-6 run-7", "compare-7", columns=80, rows=24)
        typed("specctl compare run-6 run-8", "compare", columns=80, rows=24)
        typed("specctl errors", "errors", columns=152, rows=30)
        typed("specctl watch run-8", "watch", columns=142, rows=24)
        typed("specctl plot run-6 run-8 run-9", "plot", columns=100, rows=40)
        picture = ["plot", "run-6", "run-8", "run-9", "--workers", "--png", str(folder.resolve() / "plot.png")]
        subprocess.run([*specctl, *picture], cwd=project, env=environ, check=True)


def save(console: Console, path: Path, title: str) -> None:
    write(console.export_svg(title=title), path)


TEXT = re.compile(r'x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>((?:&#160;)+)([^<]*)')
COLUMN = 12.2
"""How wide a character is in such a picture."""


def _without_edge(found: re.Match[str]) -> str:
    """A text that begins with spaces begins after them: not every viewer draws those."""
    x, y, length, more, spaces, text = found.groups()
    width = spaces.count(";") * COLUMN
    return f'x="{float(x) + width:.1f}" y="{y}" textLength="{float(length) - width:.1f}"{more}>{text}'


def write(svg: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = TEXT.sub(_without_edge, svg)
    # Rich would have the reader's browser fetch a font; any monospace does, since every text carries its length.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    # Where the environment lies that made the picture is of no interest, and different every time.
    path.write_text(svg.replace(sys.prefix, "/opt/venv"), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    to = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    main(to)
    story(to)
