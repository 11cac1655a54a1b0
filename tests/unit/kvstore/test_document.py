"""The example in the document runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore.md"


def test_the_example_runs(capsys):
    example, _ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(DOCUMENT), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count("STORED") == 2
    assert "2 blocks copied and verified" in printed
