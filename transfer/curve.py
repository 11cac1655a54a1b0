"""CURVE for ZeroMQ sockets, with keys derived from the cluster secret.

    server key pair    from HMAC(secret, "server")        the same for every server
    client key pair    from HMAC(secret, "client")        the same for every client

CURVE never sends the server's long-term public key: a client has to know it to say as much as
hello. Here it is derived from the secret and published nowhere, so without the secret no
handshake gets past its first message. A gatekeeper thread per ZeroMQ context (the ZAP protocol)
then admits the derived client key only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from typing import Any, Final

import zmq
from zmq.utils import z85

logger = logging.getLogger(__name__)

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_VERSION: Final = b"1.0"

# ZAP domain -> the client key it admits. One entry per cluster secret of this process.
_admitted: dict[bytes, bytes] = {}


def _key_pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Public and secret key in Z85; any 32 bytes are a secret key of Curve25519."""
    seed = hmac.digest(secret, b"moe-runtime control " + role, hashlib.sha256)
    private = z85.encode(seed)
    return zmq.curve_public(private), private


def secure_server(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Make a socket that will be bound admit members of the cluster only. Call before `bind`.

    Starts a thread in the socket's context, which ends with the context.

    Args:
        socket: a zmq or zmq.asyncio socket.
        secret: the cluster secret.
    """
    domain = hmac.digest(secret, b"moe-runtime control domain", hashlib.sha256).hex().encode()
    _admitted[domain] = z85.decode(_key_pair(secret, b"client")[0])
    _guard(socket.context)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.curve_publickey, socket.curve_secretkey = _key_pair(secret, b"server")
    socket.curve_server = True


def secure_client(socket: zmq.Socket[Any], secret: bytes, *, identity: str) -> None:
    """Give a socket that will be connected the member's keys. Call before `connect`.

    Args:
        socket: a zmq or zmq.asyncio socket.
        secret: the cluster secret.
        identity: the routing id that the server sees, such as an incarnation.
    """
    socket.setsockopt(zmq.ROUTING_ID, identity.encode())
    socket.curve_serverkey = _key_pair(secret, b"server")[0]
    socket.curve_publickey, socket.curve_secretkey = _key_pair(secret, b"client")


def _guard(context: zmq.Context[Any]) -> None:
    """Start the context's gatekeeper unless it has one."""
    # A shadow: plain sockets, even where the context makes asyncio's.
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    gate = shadow.socket(zmq.REP)
    gate.linger = 0
    try:
        gate.bind(ZAP_ENDPOINT)
    except zmq.ZMQError as error:
        gate.close()
        if error.errno != zmq.EADDRINUSE:
            raise
        return
    thread = threading.Thread(target=_keep_gate, args=(gate,), name="curve-gate", daemon=True)
    thread.start()


def _keep_gate(gate: zmq.Socket[bytes]) -> None:
    try:
        while True:
            gate.send_multipart(_judge(gate.recv_multipart()))
    except zmq.ContextTerminated:
        pass  # the way it always ends
    finally:
        gate.close()


def _judge(request: list[bytes]) -> list[bytes]:
    """Answer one ZAP request: version, id, domain, address, identity, mechanism, credentials."""
    request_id = request[1] if len(request) > 1 else b""
    if len(request) == 7 and request[0] == ZAP_VERSION and request[5] == b"CURVE":
        expected = _admitted.get(request[2])
        if expected is not None and hmac.compare_digest(expected, request[6]):
            return [ZAP_VERSION, request_id, b"200", b"OK", b"member", b""]
    logger.warning("a caller of the control channel without the member's key was refused")
    return [ZAP_VERSION, request_id, b"400", b"not a member", b"", b""]
