"""Exit 0 if this environment already satisfies pyproject.toml with the `dev` extra.

Lets `make` work without a network, and keeps it from touching an environment that is complete.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def missing() -> list[str]:
    """Requirements that are absent or too old, and the project itself if not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"], project["name"]]
    absent = []
    for line in wanted:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = distribution(requirement.name).version
        except PackageNotFoundError:
            absent.append(line)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            absent.append(f"{line} (found {version})")
    return absent


if __name__ == "__main__":
    sys.exit(1 if missing() else 0)
