"""The programs in the client's document run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore-client.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def run(program: str) -> None:
    exec(compile(program, str(DOCUMENT), "exec"), {})


def test_values(capsys):
    run(PROGRAMS[0])
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "stored",
        "b'hello' None",
        "stored",
        "15 bytes",
        "stored torch.Size([3, 3])",
        "['hit', 'miss']",
        "b'hello' in place",
        "1 removed by group",
    ]


def test_blocks(capsys):
    run(PROGRAMS[1])
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"4 blocks of layer {layer}" for layer in range(4)]
    assert len(PROGRAMS) == 2
