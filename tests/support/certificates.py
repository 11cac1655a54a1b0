"""Certificates for tests: authorities, and what they sign, in files."""

from __future__ import annotations

import functools
import os
import tempfile
from datetime import datetime
from pathlib import Path

import trustme

from configs.schema import TransferTls


class Authority:
    """Signs certificates of members; everything lies in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ca = trustme.CA()
        self.file = folder / "authority.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def member(self, name: str = "member", *, hosts: tuple[str, ...] = (),
               not_before: datetime | None = None,
               not_after: datetime | None = None) -> TransferTls:  # fmt: skip
        names = (f"{name}.test", *hosts)
        issued = self._ca.issue_cert(*names, not_before=not_before, not_after=not_after)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued.private_key_pem.write_to_path(str(key))
        for i, pem in enumerate(issued.cert_chain_pems):
            pem.write_to_path(str(certificate), append=i > 0)
        return TransferTls(certificate=certificate, private_key=key, authority=self.file)


@functools.cache
def member_tls() -> TransferTls:
    """One member's files, made once per process, in memory: they go with it however it ends."""
    with tempfile.TemporaryDirectory(prefix="certificates-") as folder:
        given = Authority(Path(folder)).member()
        return TransferTls(**{key: _in_memory(path) for key, path in given})


def _in_memory(path: Path) -> Path:
    fd = os.memfd_create(path.name)
    os.write(fd, path.read_bytes())
    return Path(f"/proc/self/fd/{fd}")
