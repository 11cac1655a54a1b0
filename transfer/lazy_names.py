"""Public names of a package that are loaded when first used.

What needs torch is then paid for by those who use it: the errors, keys, messages and state
machines of a package import in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return what a package's `__init__` binds to `__getattr__`.

    Args:
        package: its `__name__`.
        homes: per public name the module, inside of the package, that defines it.
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home}"), name)

    return load
