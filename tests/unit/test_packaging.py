"""What is installed, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moe_runtime

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("moe_runtime", "dispatch", "kvstore", "transfer", "elastic", "configs")


def python(program: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_public_name_exists() -> None:
    assert set(moe_runtime.__all__) <= set(dir(moe_runtime))
    for name in moe_runtime.__all__:
        assert getattr(moe_runtime, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = moe_runtime.nonsense


def test_importing_the_package_loads_nothing_heavy() -> None:
    done = python(
        "import sys, moe_runtime; "
        "print(sorted({'torch', 'zmq', 'yaml', 'pydantic'} & set(sys.modules)))",
        ROOT,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_foreign_package_of_the_same_name_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "dispatch"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("", encoding="utf-8")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import moe_runtime"
    done = python(program, tmp_path)
    assert done.returncode == 1
    assert f"package 'dispatch' comes from {foreign}" in done.stderr
    assert str(ROOT / "dispatch") in done.stderr


def test_only_the_six_packages_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix(".*") for name in included} == set(PACKAGES)
    assert "Private :: Do Not Upload" in project["project"]["classifiers"]


def test_every_package_directory_is_a_package() -> None:
    directories = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    without = [d for d in directories if not (d / "__init__.py").is_file()]
    assert without == []
