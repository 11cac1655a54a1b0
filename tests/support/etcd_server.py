"""A real etcd server for tests, alone on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

START_S = 60.0


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


class EtcdServer:
    """One member; it keeps its data when it is started again."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self.program = folder, program
        client, self.peer = free_ports(2)
        self.endpoint = f"http://127.0.0.1:{client}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        peer = f"http://127.0.0.1:{self.peer}"
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self.program,
                    *("--data-dir", str(self.folder / "data")),
                    *("--listen-client-urls", self.endpoint),
                    *("--advertise-client-urls", self.endpoint),
                    *("--listen-peer-urls", peer),
                    *("--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}"),
                    "--unsafe-no-fsync",
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self.healthy():
            assert self.process.poll() is None, (self.folder / "etcd.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "etcd did not start"
            time.sleep(0.05)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/health", timeout=1.0) as reply:
                return b'"true"' in reply.read()
        except OSError:
            return False

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)
            self.process = None


def etcd_program() -> str:
    """Find the server, or skip."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("no etcd server here (Debian, Ubuntu: apt install etcd-server)")
    pytest.importorskip("etcd3gw", reason="no etcd client here (pip install etcd3gw)")
    return program


@contextmanager
def running_etcd(folder: Path):
    server = EtcdServer(folder, etcd_program())
    try:
        server.start()
        yield server
    finally:
        server.stop()
