"""moe-runtime: elastic serving of mixture-of-experts language models.

Users import from here. Names are loaded on first use, so `import moe_runtime` needs neither
torch nor a GPU and takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.errors import ConfigError
    from configs.loader import load_config
    from configs.schema import RuntimeConfig

__version__ = "0.1.0"

_PUBLIC = {
    "ConfigError": "configs.errors",
    "RuntimeConfig": "configs.schema",
    "load_config": "configs.loader",
}

__all__ = ["ConfigError", "RuntimeConfig", "__version__", "load_config"]

_SIBLINGS = ("configs", "transfer", "dispatch", "kvstore", "elastic")


def _check_siblings(home: Path) -> None:
    """Refuse to run with another distribution's package of one of our generic names.

    Raises:
        ImportError: A sibling is missing, or is found outside of `home`; names both paths.
    """
    for name in _SIBLINGS:
        spec = find_spec(name)
        expected = home / name
        if spec is None:
            raise ImportError(f"moe_runtime needs its package {name!r}, expected at {expected}")
        locations = list(spec.submodule_search_locations or [spec.origin or ""])
        found = Path(locations[0])
        if found.resolve() != expected.resolve():
            raise ImportError(
                f"package {name!r} comes from {found}, but moe_runtime needs the one at "
                f"{expected}: another distribution shadows it, use a virtual environment"
            )


_check_siblings(Path(__file__).resolve().parent.parent)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
