"""How an answer begins and is written down, and how an error is said."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.commands import ANSWERS
from orchestrator.errors import SpecctlError

if TYPE_CHECKING:
    from orchestrator.answers import base


def text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def head(verb: str, observed_at: float | None = None) -> base.Head:
    return {"schema_version": ANSWERS[verb], "observed_at": observed_at or time.time()}


def of_error(error: SpecctlError) -> base.Error:
    return {
        "schema_version": 1, "observed_at": time.time(),
        "error": {"message": error.message, "hint": error.hint, "kind": type(error).__name__},
        "target": error.target, "run_id": error.run_id, "exit_code": error.exit_code,
    }  # fmt: skip
