"""`specctl schema`: JSON Schema, for editors and for programs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from orchestrator.cli.base import errors
from orchestrator.commands import FILE
from orchestrator.completion import offer
from orchestrator.verbs import schema as verb


def schema(
    of: Annotated[
        str,
        typer.Argument(
            metavar="FILE|VERB", autocompletion=offer(FILE),
            help="hosts: hosts.yaml; config: a trainer's configuration; command: what --config may hold beside a CMD; "
            "or a command that has a --json.",
        ),
    ] = "hosts",
) -> None:  # fmt: skip
    """Print the JSON Schema of a file that people write, or of what a command prints with --json.

    Editors with yaml-language-server (VS Code, Neovim and others) read it from a comment in the file's first line, and
    then complete its keys and mark what is wrong in it:

    `specctl schema hosts > hosts.schema.json`, and then `# yaml-language-server: $schema=hosts.schema.json`
    """
    with errors(False):
        print(json.dumps(verb.run(of), indent=2))
