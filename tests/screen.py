"""The screen of `specctl top` for tests: driven by its keys, with Textual's pilot, and read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from textual.pilot import Pilot

from orchestrator.fleet import Fleet
from orchestrator.inventory import parse_inventory
from orchestrator.tui.app import Top
from orchestrator.tui.lists import RunList
from orchestrator.verbs import top
from tests.driver import Specctl

Scenario = Callable[[Top, Pilot[int]], Awaitable[None]]


def drive(
    specctl: Specctl, scenario: Scenario, *, words: tuple[str, ...] = (), size: tuple[int, int] = (140, 40),
    more: str = "", every_s: float = 0.5,
) -> None:  # fmt: skip
    """Runs `scenario` in front of the screen, over `specctl`'s targets and `more` of hosts.yaml."""
    fleet = Fleet(parse_inventory(specctl.inventory.read_text() + more))
    asked, _ = top.asks(fleet, words)
    board = top.Board(fleet, asked, everything=False, every_s=every_s)
    app = Top(fleet, board, program="specctl", plain=False)

    async def main() -> None:
        async with app.run_test(size=size) as pilot:
            await scenario(app, pilot)

    try:
        asyncio.run(main())
    finally:
        board.stop()
        fleet.close()


async def until(pilot: Pilot[int], check: Callable[[], Any], what: str, *, timeout_s: float = 60.0) -> Any:
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + timeout_s
    while not (value := check()):
        assert loop.time() < give_up_at, f"{what} did not happen:\n{shown(pilot.app)}"
        await pilot.pause(0.05)
    return value


def shown(app: Any) -> str:
    """The characters on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def row(app: Any, word: str) -> str:
    """The line of the list with `word` in it."""
    lines = shown(app).split("\n")[2:]
    return next((line for line in lines if word in line), "")


async def select(app: Top, pilot: Pilot[int], word: str) -> None:
    await until(pilot, lambda: row(app, word), f"{word} in the list")
    for _ in app.query_one(RunList).rows:
        if app.selected and app.selected.run and word in app.selected.run.run_id:
            return
        await pilot.press("down")
    raise AssertionError(f"{word} cannot be selected:\n{shown(app)}")
