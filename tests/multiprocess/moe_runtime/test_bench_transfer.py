"""`moe-runtime bench transfer` as a user runs it: rows, two ends, bad options, a dead target."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.serve_process import CommandProcess
from tests.support.waits import eventually

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ["-m", "moe_runtime", "bench", "transfer"]
ROW = {
    "figure": str, "operation": str, "size": int, "blocks": int, "batch": int, "backend": str,
    "operations": int, "seconds": float, "gb_s": float, "ops_s": float, "p50_us": float,
    "p99_us": float, "p999_us": float, "cpu_s_per_gb": float, "cpu_initiator_s": float,
    "cpu_target_s": float, "other_cores": float, "checked": str,
}  # fmt: skip


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *COMMAND, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def rows(output: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in output.splitlines()]
    header = lines.pop(0)
    assert header["benchmark"] == "bench transfer"
    assert {"command", "commit", "date", "machine"} <= set(header)
    assert {"processor", "cores", "kernel", "python"} <= set(header["machine"])
    for line in lines:
        assert {name: type(value) for name, value in line.items()} == ROW
    return lines


@pytest.mark.parametrize("backend", ["tcp", "shared_memory", "local"])
def test_json_rows(backend: str) -> None:
    result = bench("--backend", backend, "--sizes", "4K,1M", "--seconds", "0.1", "--json")
    assert result.returncode == 0, result.stderr
    found = rows(result.stdout)
    assert [(row["size"], row["operation"]) for row in found] == [
        (4096, "write"), (4096, "read"), (1 << 20, "write"), (1 << 20, "read"),
    ]  # fmt: skip
    assert {row["backend"] for row in found} == {backend}
    assert [row["checked"] for row in found] == ["seen", "own"] * 2


def test_a_slab(tmp_path: Path) -> None:
    result = bench("--backend", "file", "--folder", str(tmp_path), "--sizes", "5000,64K",
                   "--blocks", "10", "--batch", "3", "--seconds", "0.1", "--json")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert {row["backend"] for row in rows(result.stdout)} == {"file"}
    assert list(tmp_path.iterdir()) == []


def test_scattered_pieces_in_flight_into_private_memory() -> None:
    result = bench("--backend", "auto", "--sizes", "5000", "--blocks", "100", "--batch", "3",
                   "--seconds", "0.1", "--json", "--private", "--pin", "0",
                   "--connections", "3")  # fmt: skip
    assert result.returncode == 0, result.stderr
    for row in rows(result.stdout):
        assert (row["size"], row["blocks"], row["batch"]) == (5000, 100, 3)
        assert row["checked"] == {"write": "told", "read": "own"}[str(row["operation"])]


def test_the_table_names_every_column() -> None:
    result = bench("--sizes", "4K", "--seconds", "0.05", "--op", "write")
    assert result.returncode == 0, result.stderr
    document = (ROOT / "docs" / "bench-transfer.md").read_text(encoding="utf-8")
    for column in ("size", "blocks", "op", "backend", "GB/s", "op/s", "p50 us", "p99 us",
                   "p99.9 us", "CPU s/GB", "other cores", "check"):  # fmt: skip
        assert column in result.stdout
        assert f"`{column}`" in document


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "4X"], "'4X' is not a size"),
        (["--sizes", "1G", "--blocks", "1000000"], "GiB on both sides together"),
        (["--blocks", "0"], "--blocks"),
        (["--batch", "-1"], "--batch"),
        (["--seconds", "0"], "--seconds"),
        (["--backend", "pigeon"], "'pigeon' is not one of"),
        (["--pin", "9999"], "usable cores are"),
        (["--pin", "one"], "not a list of core numbers"),
        (["--priority", "high"], "'high' is not one of"),
        (["--serve", "--connect", "127.0.0.1:1"], "give one of them"),
        (["--serve"], "--secret-file"),
        (["--connect", "nowhere"], "not HOST:PORT"),
        (["--backend", "file"], "--folder belong together"),
        (["--folder", "nowhere"], "does not exist"),
        (["--backend", "local", "--connect", "127.0.0.1:1"], "no other end"),
    ],
)
def test_nonsense_is_refused_at_once(arguments: list[str], said: str) -> None:
    result = bench(*arguments)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_killed_target_is_one_clear_line(tmp_path: Path) -> None:
    arguments = ["--sizes", "4K", "--seconds", "60", "--backend", "tcp", "--json"]
    with CommandProcess([*COMMAND, *arguments], tmp_path / "bench") as command:
        command.wait_for_line('"benchmark"')
        (target,) = command.descendants("moe_runtime.bench.target")
        time.sleep(0.3)
        target.kill()
        assert command.wait(60) == 1
    said = command.log.read_text().splitlines()
    (line,) = [line for line in said if not line.startswith("warning: others use")]
    assert line.startswith("Error: the target 127.0.0.1:")
    assert line.endswith("killed by signal 9")


def write_secret(path: Path, secret: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(secret)
    return path


def test_two_ends_and_a_wrong_secret(tmp_path: Path) -> None:
    right = write_secret(tmp_path / "right", "a" * 32)
    wrong = write_secret(tmp_path / "wrong", "b" * 32)
    serve = [*COMMAND, "--serve", "--secret-file", str(right)]
    with CommandProcess(serve, tmp_path / "serve") as target:
        address = target.wait_for_line(r"^127\.0\.0\.1:\d+$")[0]
        short = ["--connect", address, "--sizes", "4K", "--seconds", "0.05", "--json"]
        refused = bench(*short, "--secret-file", str(wrong))
        assert refused.returncode == 1
        assert "secret" in refused.stderr or "hung up" in refused.stderr
        assert "Traceback" not in refused.stderr
        for _ in range(2):  # it serves one initiator after another
            result = bench(*short, MOE_RUNTIME_SECRET="a" * 32)
            assert result.returncode == 0, result.stderr
            assert len(rows(result.stdout)) == 2
        assert psutil.Process(target.pid).cmdline().count(str(right)) == 1
        assert "a" * 32 not in " ".join(psutil.Process(target.pid).cmdline())
        target.send(signal.SIGINT)
        assert target.wait(60) == 0


def slab_without_a_name(pid: int) -> bool:
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return any(name.endswith(".slab (deleted)") for name in found)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_kills_it_leaves_no_slab(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "slabs"
    folder.mkdir()
    command = [*COMMAND, "--backend", "file", "--folder", str(folder), "--seconds", "600"]
    with CommandProcess(command, tmp_path / "bench") as process:
        eventually(lambda: slab_without_a_name(process.pid), "it measures a slab")
        process.send(number)
        process.wait(60)
    assert list(folder.iterdir()) == []


def test_ctrl_c_does_not_reach_the_target(tmp_path: Path) -> None:
    """It is ended by the command, which says what happened."""
    command = [*COMMAND, "--sizes", "4K", "--seconds", "600"]
    with CommandProcess(command, tmp_path / "bench") as process:
        eventually(lambda: psutil.Process(process.pid).children(), "the target is there")
        (target,) = psutil.Process(process.pid).children()
        eventually(lambda: os.getpgid(target.pid) == target.pid, "it has a group of its own")
        process.send(signal.SIGINT)
        assert process.wait(60) == 130
    assert not target.is_running()


def test_nobody_there(tmp_path: Path) -> None:
    result = bench("--connect", "127.0.0.1:9", MOE_RUNTIME_SECRET="a" * 32)
    assert result.returncode == 1
    assert "127.0.0.1:9" in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rails", "192.0.2.99"], "cannot listen on 192.0.2.99"),
        (["--host", "no-such-host.invalid"], "cannot listen on no-such-host.invalid"),
    ],
)
def test_a_target_that_cannot_listen_says_where(arguments: list[str], said: str) -> None:
    result = bench("--sizes", "4K", *arguments)
    assert result.returncode == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr
