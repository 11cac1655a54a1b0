"""The examples in the document run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
PRINTED = (
    "stored b'hello'\nexists conflict\n5 b'hello' None\nTrue False\n",
    "2 blocks copied and verified\n",
    "16 ranks: the last one has heads [7] 2 pieces\n",
    "[True, True, True]\n" * 2 + "3 pages, 3 read and verified\n" * 4,
    "True 549755289600 True\nNone\n",
)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_the_examples_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[number], str(DOCUMENT), "exec"), {})
    assert PRINTED[number] in capsys.readouterr().out


def test_the_subscriber_is_the_only_other_program() -> None:
    """It runs in `tests/multiprocess/kvstore/test_events.py`."""
    (other,) = PROGRAMS[len(PRINTED) :]
    assert "zmq.SUB" in other


def test_use_alone_takes_twenty_lines() -> None:
    assert len(PROGRAMS[0].splitlines()) <= 20
