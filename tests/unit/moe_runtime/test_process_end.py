"""A command's process ends with its status, its output written, and nothing run afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import atexit, logging, sys
from moe_runtime.process_end import run_and_end
atexit.register(lambda: sys.stderr.write("tidied up"))
logging.basicConfig(format="%(message)s")
def command():
    sys.stdout.write("said")
    logging.getLogger().warning("logged")
    BODY
run_and_end(command)
"""

# Ctrl-C comes in the moment in which a module is looked for.
INTERRUPTED = """
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "MODULE":
            sys.stdout.write("interrupted")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGINT)
from moe_runtime.__main__ import start
sys.meta_path.insert(0, Finder)
sys.argv = ["moe-runtime", "config", "show"]
start()
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return run_program(PROGRAM.replace("BODY", body))


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "status", "stderr"),
    [
        ("pass", 0, "logged\n"),
        ("sys.exit(0)", 0, "logged\n"),
        ("sys.exit(None)", 0, "logged\n"),
        ("sys.exit(7)", 7, "logged\n"),
        ("sys.exit('why')", 1, "logged\nwhy\n"),
    ],
)
def test_status_and_output(body: str, status: int, stderr: str) -> None:
    done = run(body)
    assert (done.returncode, done.stdout, done.stderr) == (status, "said", stderr)


def test_another_error_is_not_hidden() -> None:
    done = run("1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "tidied up" in done.stderr


@pytest.mark.parametrize(
    "body", ["pass", "sys.stdout.flush()", "sys.stdout.write('x' * 100_000)", "sys.exit(0)"]
)
def test_a_disk_that_is_full_is_one_line(body: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("BODY", body)],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line != "logged"]
    assert said == ["Error: [Errno 28] No space left on device"]


@pytest.mark.parametrize(
    "module", ["moe_runtime.cli", "click", "moe_runtime.config_command", "pydantic"]
)
def test_an_interrupt_while_it_is_loaded_is_no_error(module: str) -> None:
    done = run_program(INTERRUPTED.replace("MODULE", module))
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted", "")
