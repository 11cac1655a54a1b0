"""The rules of the house that no linter knows. A file that breaks one fails here by name."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("moe_runtime", "dispatch", "kvstore", "transfer", "elastic", "configs")
MODULE_LINES_MAX, KERNEL_LINES_MAX, TEST_LINES_MAX = 400, 350, 500
FUNCTION_LINES_MAX, KERNEL_FUNCTION_LINES_MAX = 60, 80
COLUMNS_MAX = 100
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
# Spelt in two halves, so that this file does not find itself.
BANNED_TEXT = (
    r"\bFIX" r"ME\b",
    r"\bX" r"XX\b",
    r"/wo" r"rk/",
    r"\bnoqa: *$",
    r"contracts" r"\.md",
    r"pdb\.set_" r"trace",
    r"\bbreak" r"point\(",
)
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ""}


@cache
def tracked() -> list[Path]:
    """Files of the repository: tracked, or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listing.stdout.splitlines()]
    return [path for path in paths if path.is_file()]


def python_files() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py"]


def package_files() -> list[Path]:
    return [path for path in python_files() if path.relative_to(ROOT).parts[0] in PACKAGES]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Those that a rule looks at; most of a tree are names and numbers."""
    wanted = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Call)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return [node for node in ast.walk(tree) if isinstance(node, wanted)]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_lines(path: Path) -> list[str]:
    lines = text_of(path).splitlines()
    return [f"{shown(path)}:{i}" for i, line in enumerate(lines, 1) if len(line) > COLUMNS_MAX]


def oversized_modules(paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        limit = MODULE_LINES_MAX
        if "kernels" in path.parts:
            limit = KERNEL_LINES_MAX
        elif "tests" in path.parts:
            limit = TEST_LINES_MAX
        count = len(text_of(path).splitlines())
        if count > limit:
            found.append(f"{shown(path)}: {count} lines, at most {limit}")
    return found


def oversized_functions(paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        is_kernel = "kernels" in path.parts
        limit = KERNEL_FUNCTION_LINES_MAX if is_kernel else FUNCTION_LINES_MAX
        for node in functions(path):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                found.append(f"{shown(path)}:{node.lineno} {node.name}: {length} lines")
    return found


def printing(paths: list[Path]) -> list[str]:
    return [
        f"{shown(path)}:{node.lineno}"
        for path in paths
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def banned_text(paths: list[Path]) -> list[str]:
    pattern = re.compile("|".join(BANNED_TEXT), re.MULTILINE)
    found = []
    for path in paths:
        text = text_of(path)
        lines = {text.count("\n", 0, match.start()) + 1 for match in pattern.finditer(text)}
        found.extend(f"{shown(path)}:{line}" for line in sorted(lines))
    return found


def test_modules_stay_readable() -> None:
    assert oversized_modules(python_files()) == []


def test_functions_stay_readable() -> None:
    assert oversized_functions(package_files()) == []


def test_lines_fit_the_page() -> None:
    assert [line for path in python_files() for line in long_lines(path)] == []


def test_file_names_say_something() -> None:
    named = [path for path in python_files() if path.stem in BANNED_NAMES]
    assert [shown(path) for path in named] == []


def test_packages_log_instead_of_printing() -> None:
    assert printing(package_files()) == []


def test_no_leftovers_in_the_text() -> None:
    texts = [path for path in tracked() if path.suffix in TEXT_SUFFIXES]
    assert banned_text(texts) == []


def test_every_module_postpones_annotations() -> None:
    missing = [
        shown(path)
        for path in package_files()
        if (text := path.read_text(encoding="utf-8")).strip()
        and "from __future__ import annotations" not in text
        and any(not isinstance(node, ast.Expr) for node in ast.parse(text).body)
    ]
    assert missing == []


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.shown", str)
    bad = tmp_path / "bad.py"
    body = "    x = 1\n" * FUNCTION_LINES_MAX
    marker = "FIX" + "ME"
    bad.write_text(f"def long():\n{body}\nprint('{'y' * COLUMNS_MAX}')\n# {marker}\n" + "\n" * 400)
    assert oversized_modules([bad])
    assert oversized_functions([bad]) == [f"{bad}:1 long: 61 lines"]
    assert long_lines(bad) == [f"{bad}:63"]
    assert printing([bad]) == [f"{bad}:63"]
    assert banned_text([bad]) == [f"{bad}:64"]
