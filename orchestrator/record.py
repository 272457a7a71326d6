"""`record`: a dataclass that is frozen, takes keywords only, has slots, and costs a tenth to make.

`@dataclass(frozen=True)` compiles six functions for each class whenever a program starts, half a millisecond in all,
and a probe, which makes two dozen classes, lives for forty. What all records do alike is written once, here. To
`dataclasses.replace`, `fields` and `asdict` a record is a dataclass like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[T], T]:
        return lambda decorator: decorator


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    cls.__doc__ = cls.__doc__ or cls.__name__  # else dataclass imports inspect to write down a signature
    made = dataclass(init=False, repr=False, eq=False, kw_only=True, slots=True)(cls)
    for name in ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"):
        setattr(made, name, _Record.__dict__[name])
    return made


class _Record:
    def __init__(self, **values: Any) -> None:
        for name, one in self.__dataclass_fields__.items():  # type: ignore[attr-defined]
            if name in values:
                value = values.pop(name)
            elif one.default is not MISSING:
                value = one.default
            elif one.default_factory is not MISSING:
                value = one.default_factory()
            else:
                raise TypeError(f"{type(self).__name__} lacks {name}")
            object.__setattr__(self, name, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    def __repr__(self) -> str:
        said = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__qualname__}({said})"

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(_values(self))

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


def _values(one: Any) -> tuple[Any, ...]:
    return tuple(getattr(one, name) for name in one.__dataclass_fields__)
