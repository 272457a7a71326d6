"""`logs -f`: what is written from now on, in whichever file, until the run has ended.

A file is read on by its descriptor, so that a log that is renamed is read to its end before the one that has taken its
name; whatever cost lines, or may have, is said in a note.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from orchestrator.agent import proc, records
from orchestrator.agent.lines import Section
from orchestrator.agent.logs import SECTIONS_LIMIT, Reader
from orchestrator.agent.probe import probe
from orchestrator.agent.search import Search
from orchestrator.logscan.clean import Block

POLL_S = 0.1
LOOK_S = 0.5


class Follow:
    """What a `Reader` has begun, to the end of the run."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._searches: dict[int, Search] = {}
        self._replaced = False

    def run(self) -> None:
        looked_at = 0.0
        while True:
            over = False
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                over = self._is_over()
                self._look()
            self._look_at_repeats(over=over)
            for section in self.reader.sections:
                self._advance(section, over=over)
            if over:
                return
            self.reader.beat()
            time.sleep(POLL_S)

    def _is_over(self) -> bool:
        """Nothing will be written any more: an end is on record, or nothing of the run is alive to write one."""
        reader = self.reader
        if records.exit_record(reader.paths) is not None:
            return True
        supervisor = records.supervisor(reader.paths)
        if supervisor is not None and proc.same(supervisor.pid, supervisor.start_ticks) is not None:
            return False
        seen = probe(reader.call, [reader.seen.run_id], time.time())
        return not seen or seen[0].exit is not None or (not seen[0].supervisor_alive and not seen[0].tree)

    # --- files that come and go -------------------------------------------------------------------------------------

    def _look(self) -> None:
        reader = self.reader
        logs = [one.foreign for one in records.followed(reader.paths, reader.seen.nonce) if one.foreign]
        names = {section.log: section for section in reader.sections if section.log is not None}
        for section in reader.open_foreign(logs):
            old = names.get(section.log or "")
            if old is None:
                reader.note(f"the program writes {section.path} too")
            else:
                self._advance(old, over=True)
                reader.note(f"{section.log} was rotated: its old file is read to its end, byte {old.offset:,}")
            names[section.log or ""] = section
            reader.announce([section])
        while len(reader.sections) > SECTIONS_LIMIT:  # a log that is rotated while it is followed
            oldest = reader.sections.pop(1)
            reader.closed_lines += oldest.lines
            self._searches.pop(oldest.number or 0, None)
            os.close(oldest.fd)
        if not self._replaced and reader.sections and self._own_is_replaced(reader.sections[0]):
            self._replaced = True
            reader.note(f"{reader.sections[0].path} was renamed, deleted or replaced; this is still the run's own log")

    def _look_at_repeats(self, *, over: bool) -> None:
        reader = self.reader
        for repeat in [one for one in reader.repeats if not one.holds(over=over)]:
            reader.repeats.remove(repeat)
            section = repeat.section
            section.skip_to(max(repeat.line, section.start), 0)
            section.start = section.wanted = section.offset
            reader.sections.append(section)
            reader.note(f"{section.path} repeated the run's own log up to byte {section.start:,}, and no longer does")
            reader.announce([section])

    def _own_is_replaced(self, own: Section) -> bool:
        try:
            found = os.stat(own.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != own.key

    # --- lines that come --------------------------------------------------------------------------------------------

    def _advance(self, section: Section, *, over: bool) -> None:
        lost = section.lost()
        if lost is not None:
            how, begin = lost
            self._pass_on(section, section.finish(), over=True)
            section.begin_again(begin)
            self.reader.note(f"{section.path} {how}: read on from byte {begin:,}")
            self.reader.announce([section])
        self._pass_on(section, section.read(), over=False)
        if over:
            self._pass_on(section, section.finish(), over=True)

    def _pass_on(self, section: Section, blocks: Iterable[Block], *, over: bool) -> None:
        reader, number = self.reader, section.number or 0
        if reader.pattern is None:
            for lines in section.whole(blocks, over=over):
                reader.send(section, lines)
            return
        search = self._searches.get(number)
        for block in blocks:
            if search is None:
                search = self._searches[number] = Search(reader.pattern, places=True, follow=True)
            search.feed(block)
            for lines in search.found():
                reader.send(section, lines)
            reader.beat()
        if search is None:
            return
        search.flush()
        if over:
            del self._searches[number]
        for lines in search.finish() if over else search.found():
            reader.send(section, lines)
