"""A real etcd server for tests, alone on this machine."""

from __future__ import annotations

import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from configs.schema import TransferTls

START_S = 60.0
FIRST_STARTS = 5  # its ports are others' too between being found free and its listening


def free_ports(number: int) -> list[int]:
    """Ports that are free, and that the kernel gives to nobody who asks for any."""
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    some, found = range(min(10_000, lowest // 2), lowest), []
    while len(found) < number:
        port = secrets.choice(some)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found


class EtcdServer:
    """One member; it keeps its data when it is started again.

    `tls`: its certificate and key, and the authority of its own and of clients' certificates; who
    has none is not answered.
    """

    def __init__(self, folder: Path, program: str, *, tls: TransferTls | None = None) -> None:
        self.folder, self.program, self.tls = folder, program, tls
        self.process: subprocess.Popen[bytes] | None = None
        self._choose_ports()

    def _choose_ports(self) -> None:
        client, self.peer = free_ports(2)
        scheme = "http" if self.tls is None else "https"
        self.endpoint = f"{scheme}://127.0.0.1:{client}"

    def start_first(self) -> None:
        """Start it for the first time, at ports that nobody else has."""
        for _ in range(FIRST_STARTS):
            if self.start():
                return
            self.stop()
            shutil.rmtree(self.folder / "data", ignore_errors=True)
            self._choose_ports()
        raise AssertionError((self.folder / "etcd.log").read_text()[-2000:])

    def start(self) -> bool:
        """Start it; False if somebody else has one of its ports."""
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
                    *self._tls_options(),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self.healthy():
            if self.process.poll() is not None:
                said = (self.folder / "etcd.log").read_text()[-2000:]
                assert "address already in use" in said, said
                return False
            assert time.monotonic() < deadline, "etcd did not start"
            time.sleep(0.05)
        return True

    def _tls_options(self) -> list[str]:
        if self.tls is None:
            return []
        return [
            *("--cert-file", str(self.tls.certificate), "--key-file", str(self.tls.private_key)),
            *("--client-cert-auth", "--trusted-ca-file", str(self.tls.authority)),
        ]

    def healthy(self) -> bool:
        context = None
        if self.tls is not None:
            context = ssl.create_default_context(cafile=self.tls.authority)
            context.load_cert_chain(self.tls.certificate, self.tls.private_key)
        url = f"{self.endpoint}/health"
        try:
            with urllib.request.urlopen(url, timeout=1.0, context=context) as reply:
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
def running_etcd(folder: Path, *, tls: TransferTls | None = None):
    server = EtcdServer(folder, etcd_program(), tls=tls)
    try:
        server.start_first()
        yield server
    finally:
        server.stop()
