"""The shape that the errors of all packages have: facts as fields, and a text made of them.

A subclass names its facts like a dataclass, which it is, and says how they read in `_message`:

    class JoinTimeout(ElasticError):
        retryable = True

        rank: int
        waited_s: float

        def _message(self) -> str:
            return f"rank {self.rank} could not join within {self.waited_s:.3g} s"
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class TypedError(Exception):
    """Base of the errors of this project. Survives pickling and copying, notes included.

    Facts are given by name. `str` is the message as it was when the error was made, and so is the
    only one of `args`. Two errors are equal only if they are one: an error that was raised has a
    history of its own.

    Attributes:
        retryable: whether the same call can succeed later without anything else being changed.
    """

    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        """Make the facts that `cls` names fields of its constructor."""
        super().__init_subclass__()
        dataclass(kw_only=kw_only, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        """Put the text where `str` and Python's own errors have it."""
        self.args = (self._message(),)

    @property
    def fields(self) -> dict[str, Any]:
        """The facts, by name."""
        return {fact.name: getattr(self, fact.name) for fact in fields(self) if fact.init}

    def _message(self) -> str:
        """What happened, in one line: what, which, observed, expected."""
        return type(self).__name__

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        return f"{type(self).__qualname__}({facts})"

    def __reduce__(self) -> tuple[Any, ...]:
        # What the default protocol passes on is `args`, and the constructor takes the facts.
        facts = self.fields
        rest = {name: value for name, value in self.__dict__.items() if name not in facts}
        return _rebuild, (type(self), facts), rest


def _rebuild(kind: type[TypedError], facts: dict[str, Any]) -> TypedError:
    return kind(**facts)
