"""Whether a package's compiled part is used."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType


def compiled_part(name: str) -> ModuleType | None:
    """Return an extension module; None where it was not built, or MOE_RUNTIME_NATIVE=0 forbids it.

    What stands in for it then, with the same results, is the caller's.

    Args:
        name: in full, as "dispatch._native".
    """
    if os.environ.get("MOE_RUNTIME_NATIVE") == "0":
        return None
    try:
        return import_module(name)
    except ImportError:
        return None
