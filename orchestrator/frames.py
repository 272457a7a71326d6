"""How an agent answers: one line a frame, so that noise before, between and after never counts as an answer.

    RS specctl1 TOKEN CRC JSON LF [RAW]

RS is byte 0x1e, TOKEN the request's own (an echo of another request is not an answer), CRC the CRC-32 of the JSON in
eight hex digits, and JSON is pure ASCII. A shell's start-up text, `perl` warnings or a stray `\\r` can surround it.
A frame whose JSON says `raw: N` is followed by N bytes as they are, with the CRC-32 `sum`: the content of files, in
either direction. What is written into a frame, or into its raw bytes, by somebody else on the same way, damages it.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, BinaryIO

MARK = b"\x1especctl1 "


def encode(token: str, payload: dict[str, Any], raw: bytes | None = None) -> bytes:
    if raw is not None:
        payload = {**payload, "raw": len(raw), "sum": zlib.crc32(raw)}
    body = json.dumps(payload, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return b"%s%s %08x %s\n%s" % (MARK, token.encode("ascii"), zlib.crc32(body), body, raw or b"")


def decode(token: str, line: bytes) -> dict[str, Any] | None:
    """The payload of the frame that `line` is or ends with; None if it is none of this token's."""
    start = MARK + token.encode("ascii") + b" "
    at = line.find(start)
    if at < 0:
        return None
    crc, _, body = line[at + len(start) :].rstrip(b"\r\n").partition(b" ")
    try:
        if int(crc, 16) != zlib.crc32(body):
            return None
        payload = json.loads(body)
    except ValueError:
        return None
    return payload if isinstance(payload, dict) else None


def read(token: str, file: BinaryIO) -> dict[str, Any] | None:
    """The next frame of a stream that holds nothing else, with its `raw` bytes; None at its end, or where it is cut
    or damaged."""
    payload = decode(token, file.readline())
    if payload is not None and "raw" in payload:
        wanted = payload["raw"]
        payload["raw"] = file.read(wanted)
        if len(payload["raw"]) < wanted or zlib.crc32(payload["raw"]) != payload.pop("sum"):
            return None
    return payload


class FrameReader:
    """Feed bytes, get the payloads of the complete frames that carry `token`; what is not a frame lands in `noise`."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._buffer = bytearray()
        self._awaiting: dict[str, Any] | None = None
        """A frame whose raw bytes are still coming."""
        self.noise = bytearray()
        self.damaged = False
        """Whether a frame of this token's has come that is not as it was sent: what follows it is not read."""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        # Only the new bytes are searched for a newline: a frame of 64 MiB must not be searched again at each read.
        searched = len(self._buffer)
        self._buffer += data
        frames: list[dict[str, Any]] = []
        start = 0
        while not self.damaged:
            if self._awaiting is not None:
                end = start + self._awaiting["raw"]
                if len(self._buffer) < end:
                    break
                with memoryview(self._buffer) as view:
                    self._awaiting["raw"] = bytes(view[start:end])
                if zlib.crc32(self._awaiting["raw"]) != self._awaiting.pop("sum", None):
                    self.damaged = True
                    break
                frames.append(self._awaiting)
                self._awaiting = None
                start = searched = end
            end = self._buffer.find(b"\n", max(start, searched))
            if end < 0:
                break
            line = bytes(self._buffer[start:end])
            start = end + 1
            payload = decode(self._token, line)
            if payload is None:
                self.noise += line[-4096:] + b"\n"
                del self.noise[:-65536]
                self.damaged = MARK + self._token.encode("ascii") + b" " in line
            elif type(payload.get("raw")) is int:
                self._awaiting = payload
            else:
                frames.append(payload)
        del self._buffer[:start]
        return frames
