"""Which Pythons a target has, for the error that the one it was asked with cannot run the agent.

Asked of `sh`, since there may be nothing else; nothing is chosen by itself, the hint names what `python:` can be.
"""

from __future__ import annotations

import re

from orchestrator.errors import SpecctlError
from orchestrator.transport.base import Transport

OLDEST = (3, 10)
LOOK_S = 15.0
SCRIPT = r"""
user=${1:-$(id -un)}
home=$(while IFS=: read -r name _ _ _ _ dir _; do [ "$name" = "$user" ] && echo "$dir"; done </etc/passwd)
for python in /usr/local/bin/python3 /usr/local/bin/python3.[0-9] /usr/local/bin/python3.[0-9][0-9] \
    /usr/bin/python3 /usr/bin/python3.[0-9] /usr/bin/python3.[0-9][0-9] \
    /opt/*/bin/python3 /opt/conda/envs/*/bin/python3 /root/.local/share/uv/python/*/bin/python3 \
    "${home:-/nowhere}"/*conda*/bin/python3 "${home:-/nowhere}"/*forge*/bin/python3 \
    "${home:-/nowhere}"/.pyenv/versions/*/bin/python3 "${home:-/nowhere}"/.local/bin/python3 \
    "${home:-/nowhere}"/.local/share/uv/python/*/bin/python3; do
    [ -x "$python" ] || continue
    timeout 5 "$python" -I -S -c 'import sys, json, MODULES
print("specctl-python %d.%d %s" % (sys.version_info[:2] + (sys.argv[1],)))' "$python" 2>/dev/null
done
exit 0
"""


def hint(transport: Transport, user: str | None) -> str:
    """What to do about a missing or unfit python3, with those that were found over there."""
    found = look(transport, user)
    fit = [(version, path) for version, path in found if version >= OLDEST]
    if fit:
        (major, minor), path = fit[0]
        return f"there is Python {major}.{minor} at {path}: set `python: {path}` of this target in hosts.yaml"
    seen = ", ".join(f"{major}.{minor} at {path}" for (major, minor), path in found)
    found_only = f" (found only {seen})" if seen else ""
    return (
        f"install a whole Python 3.10 or newer there{found_only}: apt-get install python3, or name one as `python:` of "
        "this target in hosts.yaml"
    )


def look(transport: Transport, user: str | None) -> list[tuple[tuple[int, int], str]]:
    """(version, path) of every whole Python 3 that was found, the newest first; empty when nobody can say."""
    try:
        from orchestrator.agent.place import MODULES  # all that an agent's launch needs comes with it

        script = SCRIPT.replace("MODULES", ", ".join(MODULES))
        argv = ["env", "LC_ALL=C", "sh", "-c", script, "specctl-pythons", user or ""]
        said = transport.run(argv, deadline_s=LOOK_S).stdout.decode("utf-8", "replace")
    except SpecctlError:
        return []
    rows = re.findall(r"^specctl-python (\d+)\.(\d+) (\S.*)$", said, re.MULTILINE)
    found = sorted({((int(major), int(minor)), path) for major, minor, path in rows}, key=lambda row: row[1])
    return sorted(found, key=lambda row: row[0], reverse=True)
