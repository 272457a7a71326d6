"""Telling somebody who is not looking: a command that is run, or a URL that is sent to, until it has worked.

What may be a secret in a URL is neither printed nor kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import ConfigError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
WEBHOOK_S, COMMAND_S = 15.0, 300.0
REFUSED = (400, 401, 403, 404, 405, 410)
"""Answers of a server that will not change by asking again."""


class NotTold(Exception):
    """It did not work this time; says why."""


def command(line: str) -> Callable[[dict[str, Any]], None]:
    """Runs `line` in a shell for each thing, with it as JSON on stdin and in SPECCTL_ variables."""

    def tell(news: dict[str, Any]) -> None:
        environ = {f"SPECCTL_{key.upper()}": str(news[key]) for key in ("id", "run_id", "target", "kind", "text")}
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", line], input=json.dumps(news).encode(), env={**os.environ, **environ},
                timeout=COMMAND_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotTold(f"--exec: {error}") from error
        if done.returncode:
            raise NotTold(f"--exec ended with {done.returncode}")

    return tell


def webhook(url: str) -> Callable[[dict[str, Any]], None]:
    """POSTs each thing as JSON, with its id as Idempotency-Key. Raises `ConfigError` for what is no URL, and when the
    server refuses for good."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("--webhook is no http:// or https:// URL")

    def tell(news: dict[str, Any]) -> None:
        request = urllib.request.Request(
            url, data=json.dumps(news).encode(), method="POST",
            headers={"Content-Type": "application/json", "Idempotency-Key": news["id"], "User-Agent": "specctl"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=WEBHOOK_S):
                return
        except urllib.error.HTTPError as error:
            if error.code in REFUSED:
                raise ConfigError(f"{parts.hostname} answers {error.code} {error.reason} to --webhook") from error
            raise NotTold(f"{parts.hostname} answers {error.code} {error.reason}") from error
        except OSError as error:
            raise NotTold(f"{parts.hostname}: {getattr(error, 'reason', error)}") from error

    return tell


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
