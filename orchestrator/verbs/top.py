"""`top`: every target looked at again and again, and what was last seen of each, with how old that is.

The looks are `status`'s own: containers of one node share one exec. But each target has a pace of its own, an answer
counts as soon as it has come, and who has not answered yet is not asked again until it has: a frozen container costs
its own rows and nobody else's. Whoever shows this reads `Board.sightings`; nothing here knows of a screen.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from orchestrator.crew import Crew
from orchestrator.errors import LinkLost, SpecctlError
from orchestrator.fleet import Fleet, TargetView, each_run_once
from orchestrator.inventory import Target
from orchestrator.record import record
from orchestrator.resolve import Run, resolve, runs_of
from orchestrator.verbs.status import RECENT_S
from orchestrator.verbs.trend import Trends

FRESH_S = 5.0
"""What was seen no longer ago is said in the present tense, and on a slow link what is younger than two looks."""
SHARE = 3.0
"""A look that takes a second is made every three: a slow link, or a busy target, is asked less often."""
LONGEST_PAUSE_S = 60.0
"""A target that cannot be reached is asked less and less often, but so often at least."""


def clock() -> float:
    """Seconds that go on while this machine sleeps: what was seen before is old afterwards."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@record
class Ask:
    """What is looked at on one target."""

    target: Target
    run_ids: list[str] | None = None
    """None: all its runs."""


@record
class Sighting:
    """One target as it was last seen."""

    target: Target
    view: TargetView | None
    """The last answer; None: none has come yet."""
    runs: list[Run]
    age_s: float | None
    """How long ago the look that was answered had begun: what was seen is no older."""
    fresh: bool
    """It may be spoken of in the present tense."""
    why: str
    """Why it may not: what the last look came to, or for how long it has gone unanswered."""
    error: SpecctlError | None


@dataclass(kw_only=True, slots=True)
class _Place:
    ask: Ask
    view: TargetView | None = None
    runs: list[Run] = field(default_factory=list)
    seen_at: float | None = None
    error: SpecctlError | None = None
    failures: int = 0
    asked_at: float | None = None
    """When the look that is still unanswered began."""
    took_s: float = 0.0
    due_at: float = 0.0


def asks(fleet: Fleet, words: Sequence[str]) -> tuple[list[Ask], list[str]]:
    """(what `words` mean, as `status` understands them; what a person should be told). Raises as `resolve` does."""
    names = {*fleet.inventory.targets, *fleet.inventory.groups}
    places = [word for word in words if word in names]
    everywhere = not words
    targets = list(fleet.inventory.targets.values()) if everywhere else fleet.inventory.expand(places) if places else []
    found = {target.name: Ask(target=target) for target in targets}
    notes: list[str] = []
    for word in words:
        if word not in names:
            resolved = resolve(fleet, word)
            notes += resolved.notes
            target, run_id = resolved.run.target, resolved.run.run_id
            known = found.get(target.name)
            if known is None or known.run_ids is not None:
                ids = [*(known.run_ids or [] if known else []), run_id]
                found[target.name] = Ask(target=target, run_ids=list(dict.fromkeys(ids)))
    return list(found.values()), notes


class Board:
    """Looks, in threads of its own, from `start` to `stop`; `changed` is called, from any thread, at news."""

    def __init__(
        self, fleet: Fleet, asks: Sequence[Ask], *, everything: bool, every_s: float,
        changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.fleet, self.every_s, self.changed = fleet, every_s, changed
        self.trends = Trends(fleet, lambda: self.changed())
        self.broken: Exception | None = None
        """A bug, which whoever shows this has to raise."""
        self._within_s = None if everything else RECENT_S
        self._places = {ask.target.name: _Place(ask=ask) for ask in asks}
        self._wake = threading.Condition()
        self._crew = Crew(len(self._places) or 1)
        self._ended = self._paused = False

    # --- what was seen ----------------------------------------------------------------------------------------------

    def remember(self, views: Sequence[tuple[TargetView, float]]) -> None:
        """Takes what an earlier `top` saw, and how many seconds ago, for targets that have not answered yet."""
        with self._wake:
            for view, age_s in views:
                place = self._places.get(view.target.name)
                if place is not None and place.view is None:
                    self._see(place, view, clock() - age_s)

    def sightings(self) -> list[Sighting]:
        """In the order of the inventory, each run once."""
        now = clock()
        with self._wake:
            places = list(self._places.values())
            seen = each_run_once([one.view for one in places if one.view is not None])
            kept = {view.target.name: {probe.nonce for probe in view.runs} for view in seen}
            return [self._sighting(place, kept.get(place.ask.target.name, set()), now) for place in places]

    def _sighting(self, place: _Place, kept: set[str], now: float) -> Sighting:
        age_s = None if place.seen_at is None else max(0.0, now - place.seen_at)
        fresh = place.error is None and age_s is not None and age_s <= max(FRESH_S, 2 * self._pause_s(place) + 1)
        why = ""
        if place.error is not None:
            why = place.error.message
        elif not fresh:
            waited_s = 0.0 if place.asked_at is None else now - place.asked_at
            why = f"no answer for {waited_s:.0f} s" if waited_s >= 1 else "being asked"
        return Sighting(
            target=place.ask.target, view=place.view, runs=[run for run in place.runs if run.probe.nonce in kept],
            age_s=age_s, fresh=fresh, why=why, error=place.error,
        )  # fmt: skip

    # --- looking ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        threading.Thread(target=self._run, name="top-looks", daemon=True).start()

    def stop(self) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        self.trends.stop()

    def pause(self, paused: bool) -> None:
        """While nobody can see it, nothing is asked."""
        with self._wake:
            self._paused = paused
            self._wake.notify_all()

    def refresh(self) -> None:
        """Asks everybody now, but for those who still owe an answer."""
        with self._wake:
            for place in self._places.values():
                place.due_at = 0.0
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._ended and (self._paused or not self._due()):
                    self._wake.wait(None if self._paused else self._left_s())
                if self._ended:
                    return
                due = self._due()
                for place in due:
                    place.asked_at = clock()
            # Those of which all is wanted share what they can; the others each want something else.
            whole = [place for place in due if place.ask.run_ids is None]
            for group in [*([whole] if whole else []), *([place] for place in due if place not in whole)]:
                self._crew.do(partial(self._ask, group))

    def _due(self) -> list[_Place]:
        """Those whose time has come, and with them their neighbours whose time nearly has: they share an exec."""
        now, idle = clock(), [place for place in self._places.values() if place.asked_at is None]
        nodes = {place.ask.target.ssh for place in idle if place.due_at <= now}
        soon = now + self.every_s / 2
        return [place for place in idle if place.ask.target.ssh in nodes and place.due_at <= soon]

    def _left_s(self) -> float | None:
        due = [place.due_at for place in self._places.values() if place.asked_at is None]
        return max(0.0, min(due) - clock()) if due else None

    def _ask(self, places: list[_Place]) -> None:
        by = {place.ask.target.name: place for place in places}
        try:
            self.fleet.probe(
                [place.ask.target for place in places], run_ids=places[0].ask.run_ids, gpus=True,
                ended_within_s=self._within_s, tell=lambda view: self._take(by[view.target.name], view),
            )  # fmt: skip
        except EOFError:
            for place in places:
                lost = LinkLost("a connection ended in the middle", target=place.ask.target.name)
                self._take(place, TargetView(target=place.ask.target, error=lost))
        except Exception as error:
            self.broken = error
            self.changed()

    def _take(self, place: _Place, view: TargetView) -> None:
        with self._wake:
            if place.asked_at is None:
                return
            began, place.asked_at = place.asked_at, None
            place.error = view.error
            place.took_s = clock() - began
            place.failures = 0 if view.error is None else place.failures + 1
            if view.error is None:
                self._see(place, view, began)
            place.due_at = began + self._pause_s(place)
            self._wake.notify_all()
        self.changed()

    def _see(self, place: _Place, view: TargetView, at: float) -> None:
        place.view, place.seen_at, place.runs = view, at, runs_of(view)
        for run in place.runs:
            self.trends.saw(run)

    def _pause_s(self, place: _Place) -> float:
        """From the beginning of one look to that of the next."""
        slow_s = max(self.every_s, SHARE * place.took_s)
        if not place.failures:
            return slow_s
        return min(LONGEST_PAUSE_S, max(slow_s, self.every_s * math.pow(2.0, min(place.failures, 10) - 1)))
