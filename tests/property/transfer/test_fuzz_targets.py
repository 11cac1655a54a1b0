"""Each fuzz target runs for a moment here; `python -m fuzz.run TARGET` runs it for longer."""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.run import SKIPPED, TARGETS

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 2


def test_no_input_was_found_that_breaks_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuzz.run", *TARGETS, "--seconds", str(SECONDS),
               "--findings", str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode == SKIPPED:
        pytest.skip("atheris is not installed")
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^fuzzing (\w+)|number_of_executed_units: (\d+)", done.stderr, re.MULTILINE)
    assert [name for name, _ in found[::2]] == list(TARGETS), done.stderr[-3000:]
    assert all(int(count) > 100 for _, count in found[1::2]), "each did run"


def test_a_finding_is_kept_and_is_a_failure_not_a_skip(tmp_path: Path) -> None:
    line = "import pathlib, sys; from fuzz.run import reporting; data = sys.argv[2].encode()"
    line += "; reporting(lambda data: 1 / (data != b'Q'), pathlib.Path(sys.argv[1]))(data)"
    for data, code in (("R", 0), ("Q", 1)):
        done = subprocess.run(
            [sys.executable, "-c", line, str(tmp_path), data],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code != SKIPPED, done.stderr
    (finding,) = tmp_path.iterdir()
    assert finding.read_bytes() == b"Q"
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_seeds_without_coverage(name: str) -> None:
    """The poor man's version: it needs nothing installed."""
    target = importlib.import_module(f"fuzz.{name}")
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    seeds = target.seeds()
    assert seeds
    for _ in range(2000):
        data = bytearray(generator.choice(seeds))
        for _ in range(generator.randrange(5)):
            at = generator.randrange(len(data) + 1)
            what = generator.randrange(3)
            if what == 0:
                data[at:at] = generator.randbytes(generator.randrange(1, 40))
            elif what == 1:
                del data[at : at + generator.randrange(1, 40)]
            elif at < len(data):
                data[at] = generator.randrange(256)
        try:
            target.run(bytes(data))
        except Exception as error:
            raise AssertionError(f"seed {seed}, input {bytes(data).hex()}") from error
