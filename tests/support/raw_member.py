"""A member with a socket of its own: it proves itself, and then does what no engine would."""

from __future__ import annotations

import contextlib
import socket

from transfer.connections.handshake import DialerHandshake, Purpose


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Receive so many bytes. Raises ConnectionError when the other side closes before."""
    data = b""
    while len(data) < nbytes:
        portion = sock.recv(nbytes - len(data))
        if not portion:
            raise ConnectionError("closed")
        data += portion
    return data


def shake_hands(sock: socket.socket, machine: DialerHandshake, purpose: Purpose) -> socket.socket:
    """Return the socket, authenticated; it is closed on an error."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(sock)
        sock.sendall(machine.start(purpose))
        while not machine.done:
            sock.sendall(machine.feed(exactly(sock, machine.needed)))
        stack.pop_all()
    return sock
