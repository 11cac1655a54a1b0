"""Forks doomed peers from a process that has imported everything, with the shim loaded.

python -m tests.support.nursery DESCRIPTOR
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_lines import ANSWER_S, JsonLines

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).with_name("fault_shim.c")
BUILD_S = 60.0


class Peer:
    """A doomed peer, as the test sees it."""

    def __init__(self, nursery: JsonLines, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.channel = JsonLines(sock)
        self._nursery = nursery
        self._status: int | None = None

    def await_end(self, how: str) -> None:
        """Until it has killed or stopped itself, and nobody else has: the fault has fired."""
        if how == "SIGKILL":
            assert self.reap() == signal.SIGKILL
            return
        deadline = time.monotonic() + ANSWER_S
        while self._state() != "T":
            assert time.monotonic() < deadline, f"the peer has not stopped: {self._state()}"
            time.sleep(0.002)

    def reap(self) -> int:
        """Wait for its death; return the signal, or minus the exit code."""
        if self._status is None:
            self._nursery.say(wait=self.pid)
            status = int(self._nursery.hear()["status"])
            self._status = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -status
        return self._status

    def end(self) -> None:
        """Whatever it is doing."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()
        self.channel.close()

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


class Nursery:
    """The process that forks. `native` chooses the compiled parts, or their twins in Python."""

    def __init__(self, directory: Path, *, native: bool) -> None:
        library = build_shim(directory)
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
            cwd=ROOT, pass_fds=[theirs.fileno()],
            env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1",
                 "MOE_RUNTIME_NATIVE": "1" if native else "0"},
        )  # fmt: skip
        theirs.close()
        self._channel = JsonLines(ours)
        assert self._channel.hear()["compiled"] is native

    def fork(self, **options: Any) -> Peer:
        with socket.socket(socket.AF_UNIX) as listener:
            address = f"nursery-{secrets.token_hex(8)}"
            listener.bind("\0" + address)
            listener.listen(1)
            listener.settimeout(ANSWER_S)
            self._channel.say(fork=address, options=options)
            pid = int(self._channel.hear()["pid"])
            sock, _ = listener.accept()
        return Peer(self._channel, pid, sock)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(ANSWER_S)


def build_shim(directory: Path) -> Path:
    """Compile `fault_shim.c`; skips the test where that cannot be done."""
    library = directory / "fault_shim.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", str(SHIM), "-o", str(library), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    except OSError as error:
        pytest.skip(f"the shim that makes faults cannot be compiled: {error}")
    assert done.returncode == 0, done.stderr
    return library


def main() -> int:
    """Fork on request until the test hangs up."""
    from tests.support import doomed_peer
    from transfer import native

    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = JsonLines(sock)
    sock.settimeout(None)
    channel.say(compiled=native.COMPILED)
    while True:
        try:
            asked = channel.hear()
        except EOFError:
            return 0
        if "wait" in asked:
            channel.say(status=os.waitpid(asked["wait"], 0)[1])
            continue
        pid = os.fork()
        if pid == 0:
            sock.close()
            try:
                doomed_peer.live(asked["fork"], asked["options"])
            finally:
                os._exit(3)
        channel.say(pid=pid)


if __name__ == "__main__":
    sys.exit(main())
