"""A peer that kills or stops itself at one exact point of a connection or of a transfer.

Runs in a process that `tests.support.nursery` forks. It is told its part as keyword arguments.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.support.engines import BOTH, new_engine
from tests.support.json_lines import JsonLines
from transfer import RegionKey, TransferEngine, allocate
from transfer.backends.service import Service
from transfer.connections.control_frames import ControlFrames
from transfer.connections.handshake import AcceptorHandshake, DialerHandshake
from transfer.connections.links import Links
from transfer.connections.rendezvous import Negotiation
from transfer.wire import ControlKind

# As in `fault_shim.c`.
AT_SOCKET = {"landing": 1, "acknowledging": 2, "replying": 3}
# Which message of whose handshake is not sent any more.
AT_MESSAGE: dict[str, tuple[type, int]] = {
    "challenge": (AcceptorHandshake, 1),
    "accept": (AcceptorHandshake, 2),
    "ready": (AcceptorHandshake, 3),
    "proof": (DialerHandshake, 2),
    "confirm": (DialerHandshake, 3),
}
LIFE_S = 60.0


class Doomed:
    """The peer: `phase` says where it ends, `how` by which signal."""

    def __init__(self, channel: JsonLines, *, phase: str, how: str, backend: str, nbytes: int,
                 plain: bool, name: str, **options: Any) -> None:  # fmt: skip
        self.channel = channel
        self.phase = phase
        self.signal = signal.Signals[how]
        self.engine: TransferEngine = new_engine(backend, name=name, **options)
        self.memory = torch.zeros(nbytes, dtype=torch.uint8) if plain else allocate(nbytes)

    def live(self) -> None:
        """Meet the survivor and wait for the end."""
        self._lay_traps()
        with self.engine as engine:
            self.channel.say(address=engine.address, pid=os.getpid())
            told = self.channel.hear()
            if told["dial"]:
                engine.connect(told["address"])
            if self.phase == "greeted":
                self._end()
            key = engine.offer(engine.register(self.memory), to=told["name"], access=BOTH)
            self.channel.say(key=key.encode().hex())
            told = {**told, **self.channel.hear()}
            if told.get("key"):  # use it once: the owner knows then that we know the address
                theirs = RegionKey.decode(bytes.fromhex(told["key"]))
                source = engine.register(torch.ones(64, dtype=torch.uint8))
                engine.write(told["name"], source, theirs, 0, 0, 64).wait()
            if self.phase in AT_SOCKET:
                arm = ctypes.CDLL(None).fault_arm
                arm(AT_SOCKET[self.phase], int(self.signal), ctypes.c_long(told["after"]))
            self.channel.say(armed=True)
            if self.phase == "closing":
                engine.close()
            time.sleep(LIFE_S)

    def _end(self, *_: object) -> None:
        # To this thread: it is to take no further step.
        signal.pthread_kill(threading.get_ident(), self.signal)

    def _lay_traps(self) -> None:
        if self.phase in AT_MESSAGE:
            self._trap_message(*AT_MESSAGE[self.phase])
        elif self.phase == "signal":
            self._trap(Links, "_dial_signal")
        elif self.phase == "mapping":
            self._trap(Service, "_share")
        elif self.phase == "locating":
            self._trap(ControlFrames, "_tell_address")
        elif self.phase == "closing":
            self._trap(Links, "close")
        elif self.phase == "withdrawing":
            withdrawn = ControlKind.WITHDRAWN
            self._trap(ControlFrames, "take", lambda _, __, kind, ___: kind is withdrawn)

    def _trap(self, owner: type, method: str, when: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, method)

        def trapped(*args: Any, **named: Any) -> Any:
            if when(*args, **named):
                self._end()
            return original(*args, **named)

        setattr(owner, method, trapped)

    def _trap_message(self, machine: type, number: int) -> None:
        sent = 0

        def is_the_one(negotiation: Negotiation, data: bytes) -> bool:
            nonlocal sent
            sent += bool(data) and isinstance(negotiation.machine, machine)
            return sent == number

        self._trap(Negotiation, "send", is_the_one)


def live(address: str, options: dict[str, Any]) -> None:
    """The whole life of a forked process."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + address)
        Doomed(JsonLines(sock), **options).live()
