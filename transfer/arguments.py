"""What callers hand to the engine, checked before anything is touched.

A wrong type is a `TypeError`, a value out of range a `ValueError`, both in the caller's thread:
nothing that the engine's own thread would stumble over gets as far as its queues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import numpy as np

from transfer.connections.handshake import NAME_LENGTH_MAX, is_name

# Longer waits are not told from endless ones: ten years.
TIMEOUT_MAX_S: Final = 3.2e8


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


def check_type(what: str, value: object, wanted: type[T], *, hint: str = "") -> T:
    """Return `value`; `TypeError`, with the hint at its end, unless it is a `wanted`."""
    if not isinstance(value, wanted):
        raise TypeError(f"{what} must be a {wanted.__name__}, got {type(value).__name__}{hint}")
    return value


def check_handler(handler: F) -> F:
    """Return the handler; `TypeError` unless it can be called."""
    if not callable(handler):
        raise TypeError(f"a handler must be callable, got {type(handler).__name__}")
    return handler


def check_integer(what: str, value: object, low: int, high: int) -> None:
    """Raise unless `value` is an integer of `[low, high]`. Truth values are no integers."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{what} must be in [{low}, {high}], got {value}")


def check_timeout(timeout_s: object, name: str = "timeout_s") -> float:
    """Return seconds that a deadline can be made of; below zero is no time at all.

    Args:
        timeout_s: What a caller gave.
        name: Of his argument.

    Raises:
        TypeError: no number.
        ValueError: not a number that is ever over.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"{name} must be a number, got {type(timeout_s).__name__}")
    if not math.isfinite(timeout_s) or timeout_s > TIMEOUT_MAX_S:
        raise ValueError(f"{name} must be finite and at most {TIMEOUT_MAX_S:g}, got {timeout_s}")
    return float(timeout_s)


def check_name(name: object) -> str:
    """Return the name of an engine.

    Raises:
        TypeError: no string.
        ValueError: empty, too long, or with characters that cannot be shown.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, got {type(name).__name__}")
    if not is_name(name):
        raise ValueError(
            f"a name has 1 to {NAME_LENGTH_MAX} printable characters, got {name!r:.80}"
        )
    return name


def check_wanted(wanted: object) -> None:
    """Raise unless it maps (peer, immediate) to counts, each at least 0."""
    if not isinstance(wanted, Mapping):
        raise TypeError(f"expected {{(peer, immediate): count}}, got {type(wanted).__name__}")
    for key, count in wanted.items():
        check_immediate_key(key)
        check_integer("a count", count, 0, 2**63 - 1)


def check_immediate_key(key: object) -> None:
    """Raise unless it is a (peer, immediate)."""
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
        raise TypeError(f"expected (peer, immediate), got {key!r:.80}")
    check_integer("an immediate", key[1], 0, 2**32 - 1)
