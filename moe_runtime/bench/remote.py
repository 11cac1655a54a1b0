"""The initiator's view of the target: a request and its reply, and a look at its memory.

`Witness` maps the target's memory file, where both run on one host, only to look: so bytes can be
compared at the very moment at which an operation is said to have ended, without asking anybody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

from configs.schema import TransferConfig
from moe_runtime.bench.errors import TargetEnded, TargetRefused, TargetSilent
from moe_runtime.bench.messages import (
    Failed,
    Open,
    Opened,
    Reply,
    Request,
    decode_reply,
    encode,
)
from moe_runtime.bench.target import NOT_OPENED, Holding, TargetSettings, boot_id
from moe_runtime.bench.workload import Bytes
from moe_runtime.parent import PARENT_VARIABLE
from transfer import Peer, PeerLost, PeerUnknown, RegionKey, TransferEngine

ANSWER_S_MAX: Final = 60.0
START_S_MAX: Final = 60.0
REPLIES_MAX: Final = 16


class Remote(Protocol):
    """Answers requests. Not thread-safe.

    Attributes:
        peer: the name of its engine.
        in_process: whether its processor time is this process's own.
    """

    peer: str
    in_process: bool

    def ask(self, request: Request) -> Reply:
        """Return the reply.

        Raises:
            TargetEnded, TargetSilent, TargetRefused: there is none, or not a good one.
        """


class LocalRemote:
    """The target is this process itself (backend `local`)."""

    in_process = True

    def __init__(self, engine: TransferEngine) -> None:
        self.peer = engine.name
        self._holding = Holding(engine, engine.name)

    def ask(self, request: Request) -> Reply:
        """Answer it here."""
        reply = self._holding.answer(request)
        if isinstance(reply, Failed):
            raise TargetRefused(target="in this process", problem=reply.problem)
        return reply

    def close(self) -> None:
        """Let the window go."""
        self._holding.close()


class NotifyRemote:
    """The target is another process, asked by notify.

    Args:
        ending: says how the process ended, if it was started by this one and has.
    """

    in_process = False

    def __init__(self, engine: TransferEngine, *, ending: Callable[[], str | None]) -> None:
        self.peer = ""
        self._engine = engine
        self._ending = ending
        self._address = ""
        # b"" stands for the loss of the target.
        self._replies: queue.Queue[bytes] = queue.Queue(REPLIES_MAX)
        self._evidence = ""
        engine.on_notify(self._note)
        engine.on_peer_lost(self._lose)

    def bind(self, peer: Peer) -> None:
        """Say who it is, once connected."""
        self.peer, self._address = peer.name, peer.address

    def ask(self, request: Request) -> Reply:
        """Send it, and wait for the answer."""
        try:
            self._engine.notify(self.peer, encode(request))
            payload = self._replies.get(timeout=ANSWER_S_MAX)
        except (PeerLost, PeerUnknown) as error:
            raise self.ended(str(error)) from error
        except queue.Empty:
            raise TargetSilent(target=self._address, waited_s=ANSWER_S_MAX) from None
        if not payload:
            raise self.ended(self._evidence)
        try:
            reply = decode_reply(payload)
        except msgspec.MsgspecError as error:
            raise TargetRefused(target=self._address, problem=f"bad reply: {error}") from error
        if isinstance(reply, Failed):
            raise TargetRefused(target=self._address, problem=reply.problem)
        return reply

    def ended(self, evidence: str) -> TargetEnded:
        """Describe its end, by its exit status if that is known."""
        return TargetEnded(target=self._address, problem=self._ending() or evidence)

    def _note(self, peer: str, payload: bytes) -> None:
        if peer == self.peer:
            with contextlib.suppress(queue.Full):
                self._replies.put_nowait(payload)

    def _lose(self, peer: str, evidence: str) -> None:
        if peer == self.peer:
            self._evidence = evidence
            self._note(peer, b"")


class Witness:
    """The target's memory, mapped read-only to look at it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        mapped = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.array: Bytes = np.frombuffer(mapped, dtype=np.uint8)

    @classmethod
    def of(cls, opened: Opened, nbytes: int) -> Witness | None:
        """Map it, or None: another host, or the kernel does not let us look."""
        if opened.descriptor < 0 or not opened.boot_id or opened.boot_id != boot_id():
            return None
        try:
            path = f"/proc/{opened.pid}/fd/{opened.descriptor}"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if os.fstat(descriptor).st_size != pages:
                return None  # another process of that number, in another namespace
            return cls(descriptor, nbytes)
        finally:
            os.close(descriptor)


def open_window(remote: Remote, nbytes: int, *, private: bool) -> tuple[RegionKey, Witness | None]:
    """Have the target offer a window to us."""
    opened = remote.ask(Open(nbytes, private))
    assert isinstance(opened, Opened), "the target answers a request with its own reply"
    return RegionKey.decode(opened.key), Witness.of(opened, nbytes)


@dataclass(slots=True)
class TargetProcess:
    """A target started by this process, which it does not outlive."""

    process: subprocess.Popen[bytes]
    address: str

    def ending(self) -> str | None:
        """Say how it ended; None if it runs."""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


@contextlib.contextmanager
def target_process(
    config: TransferConfig,
    secret: bytes,
    cores: list[int] | None,
    prefix: Sequence[str] = (),
) -> Iterator[TargetProcess]:
    """Start a target on this host, and end it.

    Args:
        config: of its engine.
        secret: of the run.
        cores: where it may run; None for anywhere.
        prefix: a command that becomes the target: `ip netns exec NAME`.

    Raises:
        TargetEnded, TargetSilent: it did not come up.
    """
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "moe_runtime.bench.target"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"},
        process_group=0,  # Ctrl-C is for us: we end it
    )
    try:
        settings = TargetSettings(config=config.model_dump(mode="json"), secret=secret, cores=cores)
        yield TargetProcess(process, _first_line(process, msgspec.msgpack.encode(settings)))
    finally:
        process.terminate()
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _first_line(process: subprocess.Popen[bytes], settings: bytes) -> str:
    """Hand over the settings, and wait for the address."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(settings)
        process.stdin.close()
    line = b""
    os.set_blocking(process.stdout.fileno(), False)
    deadline = time.monotonic() + START_S_MAX
    while not line.endswith(b"\n"):
        if time.monotonic() > deadline:
            raise TargetSilent(target=f"process {process.pid}", waited_s=START_S_MAX)
        line += process.stdout.read(4096) or b""
        if process.poll() is not None and not line:
            raise TargetEnded(
                target=f"process {process.pid}", problem=f"exit status {process.returncode}"
            )
        time.sleep(0.01)
    text = line.decode().strip()
    if text.startswith(NOT_OPENED):
        problem = text.removeprefix(NOT_OPENED)
        raise TargetEnded(target=f"process {process.pid}", problem=problem)
    return text


def fresh_secret() -> bytes:
    """A secret of this run only."""
    return secrets.token_bytes(32)
