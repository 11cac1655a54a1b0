"""The look at what a test leaves behind sees a process, a thread, and shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
LEAKS = """
import subprocess, sys, threading, time
from multiprocessing import shared_memory
import pytest

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]

def test_process(keep):
    keep.append(subprocess.Popen(SLEEP))

def test_thread():
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()

def test_shared_memory(keep):
    keep.append(shared_memory.SharedMemory(create=True, size=4096))

@pytest.mark.leaves("to show that it may")
def test_declared(keep):
    keep.append(subprocess.Popen(SLEEP))

def test_process_that_is_reaped():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_nothing():
    pass

@pytest.fixture(scope="session")
def keep():
    kept = []
    yield kept
    for thing in kept:
        if isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        else:
            thing.close()
            thing.unlink()
"""


def test_leaks_are_found(tmp_path: Path) -> None:
    text = CONFTEST.read_text(encoding="utf-8").replace("SETTLE_S = 30.0", "SETTLE_S = 0.3")
    assert "SETTLE_S = 0.3" in text
    (tmp_path / "conftest.py").write_text(text, encoding="utf-8")
    (tmp_path / "test_leaks.py").write_text(LEAKS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    leaves: it does\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rpE", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    errors = {
        line.split("::")[1].split()[0]
        for line in done.stdout.splitlines()
        if line[:5] == "ERROR" and "::" in line
    }
    assert errors == {"test_process", "test_thread", "test_shared_memory"}, done.stdout
