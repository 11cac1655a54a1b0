"""The example in the documentation runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "transfer.md"


def test_the_example_runs() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 1
    exec(compile(examples[0], str(DOCUMENT), "exec"), {})
