"""Every step of CI is run once, two at a time, and none is said to have passed that did not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "tools/two_lanes.py"
WAIT = "for i in $(seq 600); do test -e {} && break; sleep 0.05; done; test -e {}"


def lanes(directory: Path, *steps: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, PROGRAM],
        cwd=directory, input="\n".join((*steps, "")), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_each_step_is_run_once_with_the_last_as_early_as_the_first(
    tmp_path: Path, count: int
) -> None:
    steps = [f"echo step {i} >> done; echo said {i}" for i in range(count)]
    if count > 1:  # they wait for one another
        steps[0] = f"touch first; {WAIT.format('last', 'last')} && {steps[0]}"
        steps[-1] = f"touch last; {WAIT.format('first', 'first')} && {steps[-1]}"
    status, output = lanes(tmp_path, *steps)
    assert status == 0, output
    done = (tmp_path / "done").read_text().splitlines() if count else []
    assert sorted(done) == [f"step {i}" for i in range(count)]
    assert all(output.count(f"\nsaid {i}\n") == 1 for i in range(count))
    assert output.partition("== all steps")[2].count("passed") == count


@pytest.mark.parametrize("bad", ["exit 3", "false", "kill -9 $$", "no-such-command"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_fails_is_named_and_the_others_go_on(tmp_path: Path, bad: str, place: int) -> None:
    steps = ["echo fine", "echo good"]
    steps.insert(place, f"echo why >&2; {bad}")
    status, output = lanes(tmp_path, *steps)
    assert status == 1
    said = output.partition("== all steps")[2].splitlines()[1:]
    assert [line for line in said if "FAILED with status" in line and bad in line], said
    assert sum("passed" in line for line in said) == 2
    assert "\nwhy\n" in output
    assert "\nfine\n" in output
    assert "\ngood\n" in output


def test_what_is_no_text_is_shown(tmp_path: Path) -> None:
    status, output = lanes(tmp_path, r"printf 'a\377b\n'; exit 1")
    assert status == 1
    assert "a\ufffdb" in output
