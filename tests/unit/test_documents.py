"""What the documents point at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CODE_PATH = re.compile(
    r"`((?:configs|transfer|dispatch|kvstore|elastic|moe_runtime|examples)/[^` ]+)`"
)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = [ROOT / path for path in CODE_PATH.findall(text) if "*" not in path]
    linked = [document.parent / path for path in LINK.findall(text)]
    assert [str(path) for path in named + linked if not path.exists()] == []


def test_readme_names_the_two_commands_of_the_makefile() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("serve", "demo", "test", "lint", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make serve" in readme
    assert "make demo" in readme
