"""Holds the agent back in its container, so that what happens in the middle of a verb needs no luck.

The target's `python:` is a script that lets each agent through, but for those of a verb that is held: these wait before
they do anything, or when 2 MiB of a transfer have passed, or when all is done and before the answer leaves. Here
`logs -f` is the verb `follow`, the look of `status` is `status`, and what push and pull ask first is `asks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tests.lab.matrix import Scene

FOLDER = "/root/gate"
SCRIPT = r"""#!/bin/sh
gate=${0%/*}
if [ -t 0 ]; then for request; do :; done; else IFS= read -r request; fi
verb=${request#*'"verb": "'} verb=${verb%%'"'*}
case $request in
*'"follow": true'*) verb=follow ;;
*'"gpus": true'*) verb=status ;;
*'"ask": "'*) verb=asks ;;
esac
wait_at() {
    [ ! -e "$gate/$verb.$1" ] || : >"$gate/$verb.held.$$"
    while [ -e "$gate/$verb.$1" ]; do sleep 0.05; done
}
half() {
    head -c 2097152
    wait_at halfway
    cat
}
: >"$gate/$verb.came.$$"
wait_at before
[ ! -t 0 ] || exec python3 "$@"
if [ -e "$gate/$verb.halfway" ]; then
    case $verb in
    receive) { printf '%s\n' "$request"; half; } | python3 "$@" ;;
    *) { printf '%s\n' "$request"; cat; } | python3 "$@" | half ;;
    esac
elif [ -e "$gate/$verb.after" ]; then
    { printf '%s\n' "$request"; cat; } | python3 "$@" >"$gate/answer.$$"
    wait_at after
    cat "$gate/answer.$$"
else
    { printf '%s\n' "$request"; cat; } | python3 "$@"
fi
"""
When = Literal["before", "halfway", "after"]


class Gate:
    """The gate of one container."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def hold(self, verb: str, when: When = "before") -> None:
        """Lets no agent of this verb pass from now on."""
        self._scene.inside(f"rm -f {FOLDER}/{verb}.held.*; : >{FOLDER}/{verb}.{when}")

    def open(self) -> None:
        self._scene.inside(f"rm -f {FOLDER}/*.before {FOLDER}/*.halfway {FOLDER}/*.after")

    def until_held(self, verb: str) -> None:
        """Until one more agent of this verb stands at the gate."""
        self._until(f"{verb}.held")

    def until_came(self, verb: str) -> None:
        """Until one more agent of this verb has come to the gate, or through it."""
        self._until(f"{verb}.came")

    def _until(self, name: str) -> None:
        wait = f'until set -- {FOLDER}/{name}.* && [ -e "$1" ]; do sleep 0.05; done; rm "$1"'
        self._scene.inside(f"timeout 90 sh -c '{wait}'")


@contextmanager
def gate(scene: Scene) -> Iterator[Gate]:
    """The target of `scene` gets a gate."""
    scene.lab.inside(scene.vmid, ["sh", "-c", f"mkdir -p {FOLDER}; cat >{FOLDER}/python; chmod +x {FOLDER}/python"],
                     input=SCRIPT)  # fmt: skip
    before = scene.specctl.inventory.read_text()
    there = f"{{vmid: {scene.vmid}}}"
    assert there in before
    scene.specctl.inventory.write_text(before.replace(there, f"{{vmid: {scene.vmid}, python: {FOLDER}/python}}"))
    made = Gate(scene)
    try:
        yield made
    finally:
        made.open()
        scene.specctl.inventory.write_text(before)
        scene.inside(f"rm -rf {FOLDER}")
