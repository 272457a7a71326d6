"""`specctl schema`: JSON Schema for editors."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from orchestrator.cli.base import errors
from orchestrator.verbs import schema as verb


class File(str, Enum):
    hosts = "hosts"
    config = "config"
    command = "command"


def schema(
    file: Annotated[
        File,
        typer.Argument(help="hosts.yaml, a trainer's configuration, or what --config may hold beside a CMD."),
    ] = File.hosts,
) -> None:
    """Print the JSON Schema of a file, so that an editor completes its keys and marks what is wrong in it.

    Editors with yaml-language-server (VS Code, Neovim and others) read it from a comment in the file's first line:

    `specctl schema hosts > hosts.schema.json`, and then `# yaml-language-server: $schema=hosts.schema.json`
    """
    with errors(False):
        print(json.dumps(verb.run(file.value), indent=2))
