"""Mutual proof of the cluster secret, before anything else is said. Pure: bytes in, bytes out.

    dialer                                        acceptor
      | -- Hello(version, purpose, name, nonce) ---> |
      | <------------- Challenge(name, nonce) ------ |
      | -- Proof(mac) -----------------------------> |   wrong: closed without a word
      | <- Accept(mac, facts, half) or Refuse(why) - |   wrong mac: the dialer hangs up
      | -- Confirm(mac, facts, half) --------------> |
      | <------------------------------ Ready(mac) - |   the connection is installed over there

Each mac is HMAC-SHA256 under a key derived from the secret, over a label and the transcript
(version, purpose, both names, both nonces, the TLS channel). The label differs by direction and
step, so no mac can be sent back to its author (reflection) or used again in another place or
conversation. Before the other side's proof only random names and nonces are told.

A control connection's *session key* is made of halves that its two ends draw at random. Further
connections of the pair are proved with a key derived from it: who knows the secret, but was not
told the session key, can open none under somebody else's name.

The handshake encrypts nothing: it keeps strangers out. `transfer.connections.tls` hides traffic
from the network; then the channel is in the transcript, so that nobody can sit in the middle.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from transfer.errors import HandshakeRefused, ProtocolViolation

VERSION: Final = 4
NONCE_BYTES: Final = 32
HALF_BYTES: Final = 32
MESSAGE_BYTES_MAX: Final = 2048
NAME_LENGTH_MAX: Final = 64
LENGTH_BYTES: Final = 2
# How a TLS handshake and an alert begin: no length of ours.
TLS_STARTS: Final = (b"\x16\x03", b"\x15\x03")


class Purpose(StrEnum):
    """What a connection is for."""

    CONTROL = "control"
    RESUME = "resume"
    SIGNAL = "signal"
    DATA = "data"


class Facts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What each side tells about itself once the other has proved itself.

    Attributes:
        address: "host:port" of its listener.
        host: identity of its kernel and network namespace; equal = same host.
        local_socket: name of its abstract unix socket.
        shared_memory: whether it is willing to share memory.
        tcp: whether it is willing to talk tcp.
        verbs: names of the RDMA devices it uses; none: it has none.
        verbs_addresses: of each, with the prefix length of its network as far as that is known.
        rails: "host:port" of each address that takes data connections; none: `address` alone.
    """

    address: str
    host: str
    local_socket: str
    shared_memory: bool
    tcp: bool
    rails: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    verbs_addresses: tuple[str, ...] = ()


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True, tag=True):
    """Opens the conversation."""

    version: int
    purpose: Purpose
    name: str
    nonce: bytes


class Challenge(_Message, frozen=True, tag=True):
    """The acceptor's half of the transcript."""

    name: str
    nonce: bytes


class Proof(_Message, frozen=True, tag=True):
    """The dialer knows the secret."""

    mac: bytes


class Accept(_Message, frozen=True, tag=True):
    """The acceptor knows the secret too, and agrees."""

    mac: bytes
    facts: bytes
    half: bytes


class Refuse(_Message, frozen=True, tag=True):
    """The acceptor knows the secret, and does not want this connection."""

    mac: bytes
    reason: str


class Confirm(_Message, frozen=True, tag=True):
    """The dialer's facts."""

    mac: bytes
    facts: bytes
    half: bytes


class Ready(_Message, frozen=True, tag=True):
    """The acceptor has installed the connection."""

    mac: bytes


Message = Hello | Challenge | Proof | Accept | Refuse | Confirm | Ready
Admission = Callable[[Purpose, str], str | None]
Sessions = Callable[[str], bytes | None]

_decoder: Final = msgspec.msgpack.Decoder(Message)
_facts_decoder: Final = msgspec.msgpack.Decoder(Facts)


def _frame(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def parse_message(body: bytes) -> Message:
    """Decode one message.

    Raises:
        ProtocolViolation: it is none.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolViolation(f"handshake message: {error}") from error


def is_name(name: str) -> bool:
    """Whether it can name an engine: short, and safe to show in a log or a terminal."""
    return 0 < len(name) <= NAME_LENGTH_MAX and name.isprintable()


def shown(text: str, length: int = 200) -> str:
    """What somebody else wrote, safe to show: on one line, and not endless."""
    return "".join(c if c.isprintable() else "?" for c in text[:length])


class Handshake:
    """One side of one handshake. Feed it exactly `needed` bytes at a time.

    Attributes:
        done: the other side is authenticated, and told its facts.
        peer_name: its name ("" until told).
        peer_facts: its facts, once `done`.
        purpose: what the connection is for.
        session: [32] bytes that the two ends of this connection share, once `done`.

    Args:
        secret: the cluster secret.
        name: our own.
        facts: told once the other side has proved itself.
        admit: why a connection is not wanted, None if it is.
        sessions: the session key of the control connection that stands with a name, None if
            none does.
    """

    def __init__(
        self, *, secret: bytes, name: str, facts: Facts, admit: Admission, sessions: Sessions
    ) -> None:
        self._key = hmac.digest(secret, b"moe-runtime transfer handshake", hashlib.sha256)
        self._name = name
        self._facts = msgspec.msgpack.encode(facts)
        self._admit = admit
        self._sessions = sessions
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._half = secrets.token_bytes(HALF_BYTES)
        self._channel = b""
        self._transcript = b""
        self._buffer = b""
        self.done = False
        self.peer_name = ""
        self.peer_facts: Facts | None = None
        self.purpose: Purpose = Purpose.CONTROL
        self.session = b""

    def bind(self, channel: bytes) -> None:
        """Tie the conversation to the encrypted channel that carries it. Before the first feed.

        Args:
            channel: the same at both ends of the channel, and at those of no other.
        """
        assert not self._transcript
        self._channel = channel

    @property
    def needed(self) -> int:
        """How many bytes to read next, never beyond the current message."""
        if len(self._buffer) < LENGTH_BYTES:
            return LENGTH_BYTES - len(self._buffer)
        return LENGTH_BYTES + self._body_bytes() - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take at most `needed` bytes; return the bytes to send.

        Raises:
            ProtocolViolation: these are no such messages.
            HandshakeRefused: the other side failed to prove itself, or refused, or was refused.
        """
        assert len(data) <= self.needed, "bytes behind the current message belong to its reader"
        self._buffer += data
        if len(self._buffer) < LENGTH_BYTES:
            return b""
        if self._buffer[:LENGTH_BYTES] in TLS_STARTS and not self._transcript:
            raise HandshakeRefused("", "the other side speaks TLS only, this one does not")
        if not 0 < self._body_bytes() <= MESSAGE_BYTES_MAX:
            raise ProtocolViolation(f"handshake message of {self._body_bytes()} bytes")
        if self.needed:
            return b""
        message, self._buffer = parse_message(self._buffer[LENGTH_BYTES:]), b""
        return self._step(message)

    def _step(self, message: Message) -> bytes:
        raise NotImplementedError

    def _body_bytes(self) -> int:
        return int.from_bytes(self._buffer[:LENGTH_BYTES], "big")

    def _mac(self, label: str, content: bytes = b"") -> bytes:
        assert self._transcript, "a mac always covers both names and nonces"
        signed = label.encode() + b"\0" + self._transcript + content
        return hmac.digest(self._key, signed, hashlib.sha256)

    def _check(self, mac: bytes, label: str, content: bytes = b"") -> None:
        if not hmac.compare_digest(mac, self._mac(label, content)):
            raise HandshakeRefused("", f"wrong {label}: {self._suspicion}")

    def _fix_transcript(self, dialer: tuple[str, bytes], acceptor: tuple[str, bytes]) -> None:
        # Each field with its length, so no two conversations share a transcript.
        fields = (str(VERSION).encode(), self.purpose.encode(), dialer[0].encode(), dialer[1],
                  acceptor[0].encode(), acceptor[1], self._channel)  # fmt: skip
        self._transcript = b"".join(len(f).to_bytes(4, "big") + f for f in fields)

    def _lean_on_control(self) -> None:
        """From here on macs are those of who shares a control connection, not the secret alone."""
        if self.purpose is not Purpose.CONTROL:
            # Nobody's: then the other side's proof is as wrong as a stranger's.
            session = self._sessions(self.peer_name) or secrets.token_bytes(HALF_BYTES)
            self._key = hmac.digest(self._key, b"session\0" + session, hashlib.sha256)

    def _make_session(self, acceptor_half: bytes, dialer_half: bytes) -> None:
        self.session = self._mac("session", acceptor_half + dialer_half)

    @property
    def _suspicion(self) -> str:
        if self._channel:
            return "another cluster secret, or somebody in the middle?"
        if self.purpose is Purpose.CONTROL:
            return "another cluster secret?"
        return "another cluster secret, or no control connection of ours?"

    def _learn(self, name: str, nonce: bytes) -> None:
        if not is_name(name) or len(nonce) != NONCE_BYTES:
            raise ProtocolViolation("handshake: no name, or a nonce of the wrong length")
        self.peer_name = name

    def _take_facts(self, facts: bytes, half: bytes) -> None:
        if len(half) != HALF_BYTES:
            raise ProtocolViolation(f"handshake: half a session key of {len(half)} bytes")
        try:
            self.peer_facts = _facts_decoder.decode(facts)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise ProtocolViolation(f"handshake facts: {error}") from error


class DialerHandshake(Handshake):
    """The side that called."""

    def start(self, purpose: Purpose) -> bytes:
        """Return the first bytes to send."""
        self.purpose = purpose
        return _frame(Hello(VERSION, purpose, self._name, self._nonce))

    def _step(self, message: Message) -> bytes:
        match message:
            case Challenge() if not self._transcript:
                return self._prove(message)
            case Refuse() if self._transcript and self.peer_facts is None:
                self._check(message.mac, "refusal", message.reason.encode())
                raise HandshakeRefused("", shown(message.reason))
            case Accept() if self._transcript and self.peer_facts is None:
                self._check(message.mac, "acceptor proof", message.facts + message.half)
                self._take_facts(message.facts, message.half)
                self._make_session(message.half, self._half)
                mac = self._mac("dialer facts", self._facts + self._half)
                return _frame(Confirm(mac, self._facts, self._half))
            case Ready() if self.peer_facts is not None and not self.done:
                self._check(message.mac, "ready")
                self.done = True
                return b""
            case _:
                raise ProtocolViolation(f"handshake: {type(message).__name__} out of turn")

    def _prove(self, message: Challenge) -> bytes:
        self._learn(message.name, message.nonce)
        if (reason := self._admit(self.purpose, message.name)) is not None:
            raise HandshakeRefused("", reason)
        self._fix_transcript((self._name, self._nonce), (message.name, message.nonce))
        self._lean_on_control()
        return _frame(Proof(self._mac("dialer proof")))


class AcceptorHandshake(Handshake):
    """The side that was called.

    After `done`, install the connection, then send `ready()`.

    Attributes:
        refused: why the dialer was refused after its proof; the shell sends and closes.
    """

    refused: str | None = None
    _proved = False

    @property
    def accepted(self) -> bool:
        """Whether the dialer has proved itself and was told to go on."""
        return self._proved and self.refused is None

    def ready(self) -> bytes:
        """Return the last message: the connection is installed here."""
        assert self.done
        return _frame(Ready(self._mac("ready")))

    def _step(self, message: Message) -> bytes:
        match message:
            case Hello() if not self.peer_name:
                if message.version != VERSION:
                    raise ProtocolViolation(f"handshake version {message.version}, not {VERSION}")
                self._learn(message.name, message.nonce)
                self.purpose = message.purpose
                self._fix_transcript((message.name, message.nonce), (self._name, self._nonce))
                return _frame(Challenge(self._name, self._nonce))
            case Proof() if self._transcript and not self._proved:
                self._lean_on_control()
                self._check(message.mac, "dialer proof")
                answer = self._answer()
                self._proved = True
                return answer
            case Confirm() if self._proved and self.refused is None and not self.done:
                self._check(message.mac, "dialer facts", message.facts + message.half)
                self._take_facts(message.facts, message.half)
                self._make_session(self._half, message.half)
                self.done = True
                return b""
            case _:
                raise ProtocolViolation(f"handshake: {type(message).__name__} out of turn")

    def _answer(self) -> bytes:
        self.refused = self._admit(self.purpose, self.peer_name)
        if self.refused is not None:
            reason = self.refused
            return _frame(Refuse(self._mac("refusal", reason.encode()), reason))
        mac = self._mac("acceptor proof", self._facts + self._half)
        return _frame(Accept(mac, self._facts, self._half))
