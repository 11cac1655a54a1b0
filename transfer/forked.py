"""What a forked child has of its parent's engine: nothing that works, and nothing that it frees.

Of the parent's threads only the one that forked goes on in the child. The others may have held
any lock, or been in the middle of any change. So the child closes descriptors and touches nothing
else, neither by using it nor by freeing it.
"""

from __future__ import annotations

from typing import Final, NoReturn

from transfer.errors import EngineClosed

REASON: Final = "the engine belongs to the parent process"

_kept: Final[list[object]] = []


class Gone:
    """Stands where a part of the engine was: any use raises `EngineClosed`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise EngineClosed(REASON)

    def __call__(self, *arguments: object) -> NoReturn:
        """Where a method of such a part was."""
        raise EngineClosed(REASON)


def disown(owner: object, *, keep: frozenset[str]) -> None:
    """Put `Gone` in the place of all attributes of `owner`, but those to keep."""
    for name, value in list(vars(owner).items()):
        if name not in keep:
            _kept.append(value)
            setattr(owner, name, Gone())
