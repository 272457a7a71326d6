"""Several documents in one row: which go together, so that little of a row is padding.

`rows.py` lays them out one behind the other; `blocks.py` and `target.py` keep them apart again by where each begins.
"""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The documents of each row, whose `lengths` together are at most `room`; every document is in exactly one.

    The longest document first, each into the row in which it leaves the least room, or else into a new one. The same
    lengths give the same rows."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    """Rows by the room that they have left."""
    there = 0
    """Bit r: some row has exactly room r left. Finds the least room that is enough without a search."""
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        length = lengths[document]
        if enough := there >> length:
            left = length + (enough & -enough).bit_length() - 1
            row = by_room[left].pop()
            if not by_room[left]:
                there ^= 1 << left
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(document)
        by_room[left - length].append(row)
        there |= 1 << (left - length)
    return rows
