"""YAML in which nothing is guessed: every scalar is text, and the schema says what it means.

Both the orchestrator (hosts.yaml, launch configurations) and the trainer (its own configuration) read their files
through `load`; this package imports neither. A schema is a `Model` whose fields use `Int`, `Float`, `Bool` and `Str`.
"""

from typedyaml.loader import TypedYamlError, load, loads
from typedyaml.schema import Abbreviated, Bool, Float, Int, Model, ProblemAt, Str

__all__ = ["Abbreviated", "Bool", "Float", "Int", "Model", "ProblemAt", "Str", "TypedYamlError", "load", "loads"]
