"""How an agent answers: one line a frame, so that noise before, between and after never counts as an answer.

    RS specctl1 TOKEN CRC JSON LF

RS is byte 0x1e, TOKEN the request's own (an echo of another request is not an answer), CRC the CRC-32 of the JSON in
eight hex digits, and JSON is pure ASCII. A shell's start-up text, `perl` warnings or a stray `\\r` can surround it.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

MARK = b"\x1especctl1 "


def encode(token: str, payload: dict[str, Any]) -> bytes:
    body = json.dumps(payload, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return MARK + b"%s %08x %s\n" % (token.encode("ascii"), zlib.crc32(body), body)


class FrameReader:
    """Feed bytes, get the payloads of the complete frames that carry `token`; what is not a frame lands in `noise`."""

    def __init__(self, token: str) -> None:
        self._start = MARK + token.encode("ascii") + b" "
        self._buffer = bytearray()
        self.noise = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        # Only the new bytes are searched for a newline: a frame of 64 MiB must not be searched again at each read.
        searched = len(self._buffer)
        self._buffer += data
        frames: list[dict[str, Any]] = []
        start = 0
        while (end := self._buffer.find(b"\n", max(start, searched))) >= 0:
            line = bytes(self._buffer[start:end])
            start = end + 1
            payload = self._parse(line)
            if payload is None:
                self.noise += line[-4096:] + b"\n"
                del self.noise[:-65536]
            else:
                frames.append(payload)
        del self._buffer[:start]
        return frames

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        at = line.find(self._start)
        if at < 0:
            return None
        crc, _, body = line[at + len(self._start) :].rstrip(b"\r").partition(b" ")
        try:
            if int(crc, 16) != zlib.crc32(body):
                return None
            payload = json.loads(body)
        except ValueError:
            return None
        return payload if isinstance(payload, dict) else None
