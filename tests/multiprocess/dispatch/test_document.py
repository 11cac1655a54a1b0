"""The programs in docs/dispatch.md run as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.etcd_server import free_ports
from tests.support.ranks import Board, run_ranks

TEXT = (Path(__file__).parents[3] / "docs" / "dispatch.md").read_text(encoding="utf-8")
PROGRAM = re.compile(r"^### ([^\n]+)\n(?:(?!^#).)*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = dict(PROGRAM.findall(TEXT))


def execute(board: Board, program: str, port: int) -> None:
    """As torchrun would, in a process that has torch already."""
    os.environ.update(
        RANK=str(board.rank),
        WORLD_SIZE=str(board.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    exec(compile(program, "docs/dispatch.md", "exec"), {"__name__": "__main__"})


def test_there_is_one_for_each_way():
    ways = ["One rank", "A process group", "The transfer engine", "DeepEP's calls"]
    assert list(PROGRAMS) == ways
    assert all(len(program.splitlines()) <= 35 for program in PROGRAMS.values())


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_program_runs(program: str):
    (port,) = free_ports(1)
    run_ranks(2 if "torchrun" in program else 1, execute, program, port, timeout_s=180)
