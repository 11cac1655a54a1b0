"""The one error of this package.

ConfigError (ValueError): everything that is wrong with a configuration, all at once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        name: Dotted name of the setting, or "" where the whole source is meant.
        origin: Where the value comes from: a file with its line, a variable, a flag; or "".
        seen: The value as written, or "" where there is none.
        expected: What would be right.
    """

    name: str
    origin: str
    seen: str
    expected: str

    def __str__(self) -> str:
        """One line: what, where from, what was expected."""
        value = f" = {self.seen}" if self.seen else ""
        origin = f" ({self.origin})" if self.origin else ""
        return f"{self.name}{value}{origin}: {self.expected}".lstrip(" :")


class ConfigError(ValueError):
    """A configuration that can't be used; `problems` has every reason, the text a line for each."""

    retryable: ClassVar[bool] = False

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        noun = "problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(f"{noun} in the configuration {source}:{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the fields, so that the error can cross processes."""
        return type(self), (self.source, self.problems)
