"""How errors become exit codes."""

from __future__ import annotations

import pytest
import typer

from orchestrator.cli.base import errors


def test_an_end_of_a_connection_that_nobody_foresaw_is_no_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, errors(False):
        raise EOFError
    assert ended.value.exit_code == 3
    assert "a connection ended in the middle (test_cli_errors.py:" in capsys.readouterr().err
