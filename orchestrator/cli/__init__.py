"""The command line: parse, call the verb, render, exit code; nothing else.

One file a command; only the one that was typed is imported, and `--help` imports none. Results go to stdout, everything
else to stderr. Exit codes: 0 yes, 1 the answer is no, 2 usage or configuration, 3 could not know, 4 no such run or
target, 130 interrupted.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from orchestrator import pydantic_alone
from orchestrator.cli.base import InventoryOption, Shared, UsageError, complain
from orchestrator.commands import COMMANDS
from orchestrator.errors import SpecctlError

HELP = {"help_option_names": ["-h", "--help"]}


class Flags:
    """Help in which an option without a value has none: typer writes `<bool>`, which nobody may type."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class Commands(Flags, TyperGroup):
    """Imports a command's module when it is about to run: the list of them all needs but their names and words."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=_docstring(cmd_name)) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        return (name, _imported(name), args[1:]) if name in COMMANDS else super().resolve_command(ctx, args)


def _docstring(name: str) -> str | None:
    """The words of the command `name`, read without importing what it needs."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_docstring(next(functions))


def _imported(name: str) -> Any:
    module = importlib.import_module(f"orchestrator.cli.{name}")
    one = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown", context_settings=HELP
    )
    kind = type("Command", (Flags, getattr(module, "Command", TyperCommand)), {})
    one.command(name, cls=kind)(getattr(module, name))
    return typer.main.get_command(one)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
    rich_markup_mode="markdown", context_settings=HELP,
)  # fmt: skip


def _version(value: bool) -> None:
    if value:
        import importlib.metadata  # slow, and of use here only

        print(f"specctl {importlib.metadata.version('specctl')}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    inventory: InventoryOption = None,
    accept_new: Annotated[
        bool,
        typer.Option(
            "--accept-new", help="Trust and remember the key of a node never seen before (never a changed key)."
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Launch training on GPU hosts and in Proxmox containers, and never believe a run you have not just seen."""
    ctx.obj = Shared(inventory=inventory, accept_new=accept_new)


def main(argv: list[str] | None = None) -> int:
    """The exit code of one command."""
    pydantic_alone.load()
    try:
        code = app(args=argv, prog_name="specctl", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SpecctlError as error:
        complain(error)
        return error.exit_code
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # it has printed the help
        from orchestrator.cli.usage import explained

        complain(explained(error, COMMANDS, argv))
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
