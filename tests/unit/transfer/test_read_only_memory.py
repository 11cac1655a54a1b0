"""Memory that is mapped read-only, or not at all: found out when it is registered and offered."""

from __future__ import annotations

import ctypes
import mmap
import secrets
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.data_connections import KINDS, header, rig, write_bytes
from tests.support.engines import BACKENDS, BOTH, engine_pair, new_engine, offer
from transfer import Access, AccessRefused, TransferEngine, allocate
from transfer.memory import address_space
from transfer.memory.address_space import is_writable
from transfer.wire import REPLY, RequestKind, Status, encode_pieces, parse_reply

SOON_S = 60.0
PAGE = mmap.PAGESIZE
NBYTES = 4 * PAGE
MAP_FIXED_NOREPLACE = 0x100000
LIBC = ctypes.CDLL(None)


def view_of(mapped: mmap.mmap) -> torch.Tensor:
    """A tensor over a mapping; numpy says that it is read-only, torch only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))


def read_only(nbytes: int = NBYTES) -> torch.Tensor:
    return view_of(mmap.mmap(-1, nbytes, prot=mmap.PROT_READ))


def of_file(tmp_path: Path) -> torch.Tensor:
    """As weights are that were mapped from a file."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (NBYTES // 256))
    with path.open("rb") as file:
        return view_of(mmap.mmap(file.fileno(), NBYTES, prot=mmap.PROT_READ))


class Loose:
    """Memory that nobody else's `mmap` looks for a place at, so that it can be unmapped."""

    def __init__(self, nbytes: int) -> None:
        map_memory = LIBC.mmap
        map_memory.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        self.start = (1 << 45) + secrets.randbelow(1 << 16) * (64 << 20)
        got = map_memory(ctypes.c_void_p(self.start), ctypes.c_size_t(nbytes),
                         mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))  # fmt: skip
        assert got == self.start
        self.tensor = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.start),
                                       dtype=torch.uint8)  # fmt: skip

    def unmap(self, offset: int, nbytes: int) -> None:
        address = ctypes.c_void_p(self.start + offset)
        assert LIBC.munmap(address, ctypes.c_size_t(nbytes)) == 0


def holes(*, unmap: bool) -> torch.Tensor:
    """Writable memory whose second page is not."""
    loose = Loose(NBYTES)
    if unmap:
        loose.unmap(PAGE, PAGE)
    else:
        second = ctypes.c_void_p(loose.start + PAGE)
        assert LIBC.mprotect(second, ctypes.c_size_t(PAGE), mmap.PROT_READ) == 0
    return loose.tensor


def read_reply(sock: socket.socket) -> Status:
    data = b""
    while len(data) < REPLY.size:
        data += sock.recv(REPLY.size - len(data))
    return parse_reply(data).status


@contextmanager
def kernel_of(age: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An old kernel does not know the query; a machine may have no /proc at all."""
    with monkeypatch.context() as patch:
        if age == "old":
            patch.setattr(address_space, "_PROCMAP_QUERY", 0)
        yield


@pytest.mark.parametrize("age", ["new", "old"])
def test_what_may_be_written(age: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, partly, torn = torch.zeros(NBYTES), holes(unmap=False), holes(unmap=True)
    cases = [(read_only(), False), (of_file(tmp_path), False), (plain, True), (partly, False)]
    with kernel_of(age, monkeypatch):
        for tensor, expected in cases:
            assert is_writable(tensor.data_ptr(), tensor.nbytes) is expected
        assert is_writable(partly.data_ptr(), PAGE)
        assert not is_writable(partly.data_ptr() + PAGE - 1, 2)
        assert is_writable(partly.data_ptr() + 2 * PAGE, 2 * PAGE)
        assert is_writable(torn.data_ptr(), PAGE)
        for start, nbytes in [(torn.data_ptr(), PAGE + 1), (torn.data_ptr() + PAGE, 1), (0, 8),
                              (2**47 - PAGE, 8), (2**63, 8)]:  # fmt: skip
            with pytest.raises(ValueError, match="not mapped"):
                is_writable(start, nbytes)


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(address_space, "_MAPS", tmp_path / "maps")
    assert is_writable(read_only().data_ptr(), NBYTES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_only_memory_is_offered_for_reading_only(backend: str, tmp_path: Path) -> None:
    with engine_pair(backend) as (a, b):
        region = b.register(of_file(tmp_path))
        for access in (Access.WRITE, BOTH):
            with pytest.raises(ValueError, match="mapped read-only"):
                b.offer(region, to=a.name, access=access)
        assert b.statistics().offers == 0
        key = offer(b, region, a, Access.READ)
        mine = a.register(allocate(NBYTES))
        a.read(b.name, mine, key, 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(mine.tensor, region.tensor)
        with pytest.raises(AccessRefused):
            a.write(b.name, mine, key, 0, 0, 8).wait(SOON_S)
        check_as_own_memory(a, b, region.tensor)


def check_as_own_memory(a: TransferEngine, b: TransferEngine, tensor: torch.Tensor) -> None:
    """It can be written from; what would land in it is refused before anything moves."""
    source, theirs = a.register(tensor), b.register(allocate(NBYTES))
    key = offer(b, theirs, a)
    a.write(b.name, source, key, 0, 0, NBYTES, immediate=3).wait(SOON_S)
    b.expect({(a.name, 3): 1}, timeout_s=SOON_S)
    assert torch.equal(theirs.tensor, tensor)
    a.prepare_write(b.name, source, key, 0, 0, 8).post().wait(SOON_S)
    for nbytes in (8, NBYTES):
        with pytest.raises(ValueError, match="mapped read-only"):
            a.read(b.name, source, key, 0, 0, nbytes)
    with pytest.raises(ValueError, match="mapped read-only"):
        a.prepare_read(b.name, source, key, 0, 0, 8)
    own = a.offer(a.register(allocate(64)), to=a.name, access=BOTH)
    with pytest.raises(ValueError, match="mapped read-only"):
        a.read(a.name, source, own, 0, 0, 8)


def test_memory_that_is_not_mapped_is_not_registered() -> None:
    with new_engine() as engine:
        with pytest.raises(ValueError, match="not mapped"):
            engine.register(holes(unmap=True))
        assert engine.register(torch.empty(0)).writable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [8, NBYTES, 64 * NBYTES])
def test_a_window_that_was_unmapped_is_refused(kind: str, nbytes: int) -> None:
    """By whoever got at it behind our back; small writes too, which no system call lands."""
    with rig(kind) as owner:
        loose = Loose(nbytes)
        token = b"unmapped window!"
        owner.server.add_offer(token, "peer", loose.start, nbytes, 3)
        sock = owner.connect()
        with sock:
            sock.sendall(write_bytes(0, b"x" * nbytes, token=token))
            assert read_reply(sock) is Status.OK
            loose.unmap(0, nbytes)
            payload = b"x" * nbytes
            sock.sendall(write_bytes(0, payload, token=token, transfer_id=2, oldest=2))
            assert read_reply(sock) is Status.GONE
            table = encode_pieces(np.array([0]), np.array([nbytes]))
            reads = header(RequestKind.READ, token=token, num_pieces=1, nbytes=nbytes,
                           transfer_id=3, oldest=3)  # fmt: skip
            sock.sendall(reads + table)
            assert read_reply(sock) is Status.GONE
            sock.sendall(write_bytes(0, b"y", transfer_id=4, oldest=4))
            assert read_reply(sock) is Status.OK, "the connection goes on"
        assert owner.memory[0] == ord("y")


@pytest.mark.parametrize("process_memory", [True, False])
def test_an_owner_survives_that_its_offer_is_unmapped(process_memory: bool) -> None:
    for backend in BACKENDS:
        with engine_pair(backend, process_memory=process_memory) as (a, b):
            loose = Loose(NBYTES)
            key = offer(b, b.register(loose.tensor), a)
            mine = a.register(allocate(NBYTES))
            a.write(b.name, mine, key, 0, 0, NBYTES).wait(SOON_S)
            loose.unmap(0, NBYTES)
            for nbytes in (8, NBYTES):
                with pytest.raises(AccessRefused):
                    a.write(b.name, mine, key, 0, 0, nbytes).wait(SOON_S)
                with pytest.raises(AccessRefused):
                    a.read(b.name, mine, key, 0, 0, nbytes).wait(SOON_S)
            well = offer(b, b.register(allocate(64)), a)
            a.write(b.name, mine, well, 0, 0, 64).wait(SOON_S)
