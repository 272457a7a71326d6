"""Telling somebody who is not looking: a command that is run, or a URL that is sent to, until it has worked.

What may be a secret in a URL is neither printed nor kept.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from orchestrator.errors import ConfigError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
WEBHOOK_S, COMMAND_S = 15.0, 300.0
REFUSED = (400, 401, 403, 404, 405, 410)
"""Answers of a server that will not change by asking again."""
VARIABLE_CHARS = 4000
"""So much of a text goes into a variable: the kernel takes no long ones. All of it is on stdin."""


class NotTold(Exception):
    """It did not work this time; says why."""


def command(line: str, *, stdout: int | None = None) -> Callable[[dict[str, Any]], None]:
    """Runs `line` in a shell for each thing, with it as JSON on stdin and in SPECCTL_ variables. What it prints goes to
    the file `stdout`, if one is named."""

    def tell(news: dict[str, Any]) -> None:
        environ = dict(os.environb)
        for key in ("id", "run_id", "target", "kind", "text"):
            environ[f"SPECCTL_{key.upper()}".encode()] = _variable(news[key])
        try:
            # In a session of its own, so that it can be ended with all that it has started.
            running = subprocess.Popen(
                ["/bin/sh", "-c", line], stdin=subprocess.PIPE, stdout=stdout, env=environ, start_new_session=True
            )  # fmt: skip
        except OSError as error:
            raise NotTold(f"--exec: {error}") from error
        with running:
            try:
                running.communicate(f"{json.dumps(news)}\n".encode(), timeout=COMMAND_S)
            except BaseException as error:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise NotTold(f"--exec did not end within {COMMAND_S:.0f} s, and was killed") from error
        if running.returncode:
            raise NotTold(f"--exec ended with {running.returncode}")

    return tell


def _variable(text: str) -> bytes:
    """As a variable can hold it, whatever a program has written there."""
    return text.replace("\0", "")[:VARIABLE_CHARS].encode("utf-8", "replace")


class _NoDetour(urllib.request.HTTPRedirectHandler):
    """A POST that is sent on to another address arrives there as a GET without a word of what it was about."""

    def redirect_request(self, *_: Any) -> None:
        return None


def webhook(url: str) -> Callable[[dict[str, Any]], None]:
    """POSTs each thing as JSON, with its id as Idempotency-Key. Raises `ConfigError` for what is no URL, and when the
    server refuses for good."""
    parts = _parts(url)
    host = parts.hostname
    headers = {"Content-Type": "application/json", "User-Agent": "specctl"}
    who, separator, place = parts.netloc.rpartition("@")
    if separator:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(who).encode()).decode("ascii")
    address = urlunsplit(parts._replace(netloc=place, fragment=""))
    opener = urllib.request.build_opener(_NoDetour)

    def tell(news: dict[str, Any]) -> None:
        request = urllib.request.Request(
            address, data=json.dumps(news).encode(), method="POST", headers={**headers, "Idempotency-Key": news["id"]}
        )  # fmt: skip
        try:
            with opener.open(request, timeout=WEBHOOK_S):
                return
        except urllib.error.HTTPError as error:
            if 300 <= error.code < 400:
                raise ConfigError(
                    f"{host} answers {error.code} to --webhook: it sends whoever asks on to another address",
                    hint="give that one to --webhook (http:// may have to be https://)",
                ) from error
            if error.code in REFUSED:
                raise ConfigError(f"{host} answers {error.code} {error.reason} to --webhook") from error
            raise NotTold(f"{host} answers {error.code} {error.reason}") from error
        except (OSError, UnicodeError) as error:  # the latter: a name that is none
            raise NotTold(f"{host}: {getattr(error, 'reason', error)}") from error
        except HTTPException as error:
            raise NotTold(f"{host} answers in no HTTP that can be read ({type(error).__name__})") from error

    return tell


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no such port, or brackets
        whole = False
    if not whole:
        raise ConfigError("--webhook is no http:// or https:// URL")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ConfigError("--webhook has characters that a URL cannot have", hint="write them as %20 and the like")
    return parts


def until_told(
    tell: Callable[[dict[str, Any]], None], say: Callable[[str], None]
) -> Callable[[dict[str, Any]], None]:
    """`tell`, again and again until it has worked; `say` gets the first failure of each."""

    def insist(news: dict[str, Any]) -> None:
        pause_s, failed = FIRST_PAUSE_S, False
        while True:
            try:
                tell(news)
                return
            except NotTold as error:
                if not failed:
                    say(f"{news['id']} is not told yet: {error}; trying again")
                failed = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    return insist
