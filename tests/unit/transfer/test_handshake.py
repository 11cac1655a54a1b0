"""Neither side without the secret gets anything, and no proof can be used twice."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
import pytest

from transfer.connections.handshake import (
    HALF_BYTES,
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    TLS_STARTS,
    VERSION,
    AcceptorHandshake,
    Admission,
    DialerHandshake,
    Facts,
    Handshake,
    Hello,
    Proof,
    Purpose,
    Sessions,
    parse_message,
)
from transfer.errors import HandshakeRefused, ProtocolViolation

SECRET = secrets.token_bytes(32)


def facts(name: str) -> Facts:
    return Facts(
        address=f"{name}:1", host="here", local_socket=f"local-{name}", shared_memory=True, tcp=True
    )


def anybody(purpose: Purpose, name: str) -> str | None:
    return None


def strangers(name: str) -> bytes | None:
    return None


def dialer(
    secret: bytes = SECRET,
    name: str = "dialer",
    admit: Admission = anybody,
    sessions: Sessions = strangers,
) -> DialerHandshake:
    return DialerHandshake(
        secret=secret, name=name, facts=facts(name), admit=admit, sessions=sessions
    )


def acceptor(
    secret: bytes = SECRET,
    name: str = "acceptor",
    admit: Admission = anybody,
    sessions: Sessions = strangers,
) -> AcceptorHandshake:
    return AcceptorHandshake(
        secret=secret, name=name, facts=facts(name), admit=admit, sessions=sessions
    )


def give(machine: Handshake, data: bytes) -> bytes:
    """Feed bytes in the portions that the machine asks for."""
    out = b""
    while data:
        portion, data = data[: machine.needed], data[machine.needed :]
        out += machine.feed(portion)
    return out


def run(
    left: DialerHandshake,
    right: AcceptorHandshake,
    seen: list[bytes],
    purpose: Purpose = Purpose.CONTROL,
) -> None:
    message = left.start(purpose)
    while message:
        seen.append(message)
        message = give(right, message)
        if message:
            seen.append(message)
            message = give(left, message)
    if right.done:
        seen.append(right.ready())
        give(left, seen[-1])


def test_both_sides_end_with_the_other_s_name_and_facts() -> None:
    left, right = dialer(), acceptor()
    run(left, right, [])
    assert left.done
    assert right.done
    assert (left.peer_name, right.peer_name) == ("acceptor", "dialer")
    assert (left.peer_facts, right.peer_facts) == (facts("acceptor"), facts("dialer"))


def test_a_dialer_without_the_secret_gets_no_answer_to_its_proof() -> None:
    left, right = dialer(secret=b"guess"), acceptor()
    challenge = give(right, left.start(Purpose.CONTROL))
    proof = give(left, challenge)
    with pytest.raises(HandshakeRefused, match="wrong dialer proof"):
        give(right, proof)
    assert right.peer_facts is None
    assert b"local-acceptor" not in challenge
    assert b"acceptor:1" not in challenge


def test_an_acceptor_without_the_secret_learns_only_name_and_nonce() -> None:
    seen: list[bytes] = []
    left, right = dialer(), acceptor(secret=b"guess")
    # It lets anybody in, as an impostor would.
    right._check = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(HandshakeRefused, match="wrong acceptor proof"):
        run(left, right, seen)
    assert not any(b"local-dialer" in message or b"dialer:1" in message for message in seen)


def test_a_proof_cannot_be_reflected() -> None:
    # The impostor answers a call by calling the caller back, and sends its proof home.
    victim_calls, victim_listens = dialer(name="victim"), acceptor(name="victim")
    hello = parse_message(victim_calls.start(Purpose.CONTROL)[LENGTH_BYTES:])
    assert isinstance(hello, Hello)
    mirrored = _framed(Hello(VERSION, Purpose.CONTROL, "impostor", hello.nonce))
    challenge = give(victim_listens, mirrored)
    nonce = msgspec.structs.asdict(parse_message(challenge[LENGTH_BYTES:]))["nonce"]
    from transfer.connections.handshake import Challenge

    proof = give(victim_calls, _framed(Challenge("impostor", nonce)))
    with pytest.raises(HandshakeRefused, match="wrong dialer proof"):
        give(victim_listens, proof)


def test_a_proof_of_another_conversation_is_worthless() -> None:
    seen: list[bytes] = []
    run(dialer(), acceptor(), seen)
    fresh = acceptor()
    give(fresh, seen[0])
    with pytest.raises(HandshakeRefused, match="wrong dialer proof"):
        give(fresh, seen[2])


def test_a_proof_is_bound_to_the_purpose() -> None:
    left, right = dialer(), acceptor()
    hello = left.start(Purpose.SIGNAL)
    changed = hello.replace(b"signal", b"data\x00\x00")
    message = parse_message(hello[LENGTH_BYTES:])
    assert isinstance(message, Hello)
    challenge = give(right, _framed(Hello(VERSION, Purpose.DATA, message.name, message.nonce)))
    assert changed != hello
    with pytest.raises(HandshakeRefused):
        give(right, give(left, challenge))


@pytest.mark.parametrize("changed", [0, 1, 2, 3, 4, 5])
def test_no_message_can_be_altered(changed: int) -> None:
    """Flip one bit of the last byte of each message in turn: somebody notices."""
    left, right = dialer(), acceptor()
    count = 0

    def pass_on(message: bytes) -> bytes:
        nonlocal count
        if count == changed:
            message = message[:-1] + bytes([message[-1] ^ 1])
        count += 1
        return message

    def converse() -> None:
        message = pass_on(left.start(Purpose.CONTROL))
        for side in (right, left, right, left, right):
            message = give(side, message)
            if side is right and right.done:
                message = right.ready()
            message = pass_on(message)
        give(left, message)

    with pytest.raises((HandshakeRefused, ProtocolViolation)):
        converse()
    assert not left.done


def test_a_refusal_is_told_only_after_both_proofs() -> None:
    left, right = dialer(), acceptor(admit=lambda purpose, name: f"{name} is fenced")
    with pytest.raises(HandshakeRefused, match="dialer is fenced"):
        run(left, right, [])
    assert right.refused == "dialer is fenced"
    assert right.peer_facts is None
    assert left.peer_facts is None


def test_a_dialer_hangs_up_on_who_it_does_not_want_before_proving_anything() -> None:
    left = dialer(admit=lambda purpose, name: "not you")
    challenge = give(acceptor(), left.start(Purpose.CONTROL))
    with pytest.raises(HandshakeRefused, match="not you"):
        give(left, challenge)


def out_of_turn() -> list[Callable[[], bytes]]:
    proof = Proof(b"x" * 32)
    return [lambda: _framed(proof), lambda: _framed(Hello(VERSION, Purpose.DATA, "n", b"short")),
            lambda: _framed(Hello(VERSION + 1, Purpose.DATA, "n", b"n" * 32)),
            lambda: _framed(Hello(VERSION, Purpose.DATA, "n" * 65, b"n" * 32)),
            lambda: (MESSAGE_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "big") + b"x",
            lambda: b"\0\0", lambda: b"\0\4GET "]  # fmt: skip


@pytest.mark.parametrize("make", out_of_turn())
def test_nonsense_is_a_violation(make: Callable[[], bytes]) -> None:
    with pytest.raises(ProtocolViolation):
        give(acceptor(), make())


def test_the_same_message_twice_is_out_of_turn() -> None:
    left, right = dialer(), acceptor()
    hello = left.start(Purpose.CONTROL)
    give(right, hello)
    with pytest.raises(ProtocolViolation, match="out of turn"):
        give(right, hello)


def _framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def sharing(session: bytes) -> Sessions:
    return {"dialer": session, "acceptor": session}.get


def test_the_ends_of_a_control_connection_come_to_one_session_key_and_never_again() -> None:
    keys = set()
    for _ in range(3):
        left, right = dialer(), acceptor()
        run(left, right, [])
        assert left.session == right.session
        assert len(left.session) == HALF_BYTES
        keys.add(left.session)
    assert len(keys) == 3


@pytest.mark.parametrize("purpose", [p for p in Purpose if p is not Purpose.CONTROL])
def test_further_connections_need_the_session_key_at_both_ends(purpose: Purpose) -> None:
    key = secrets.token_bytes(HALF_BYTES)
    left, right = dialer(sessions=sharing(key)), acceptor(sessions=sharing(key))
    run(left, right, [], purpose)
    assert left.done
    assert right.done
    for other in (strangers, sharing(secrets.token_bytes(HALF_BYTES))):
        left, right = dialer(sessions=other), acceptor(sessions=sharing(key))
        with pytest.raises(HandshakeRefused, match="wrong dialer proof"):
            run(left, right, [], purpose)
        left, right = dialer(sessions=sharing(key)), acceptor(sessions=other)
        with pytest.raises(HandshakeRefused, match="wrong dialer proof"):
            run(left, right, [], purpose)


@pytest.mark.parametrize("channels", [(b"one", b"two"), (b"", b"two"), (b"one", b"")])
def test_a_conversation_that_changes_its_channel_on_the_way_fails(
    channels: tuple[bytes, bytes],
) -> None:
    left, right = dialer(), acceptor()
    left.bind(channels[0])
    right.bind(channels[1])
    with pytest.raises(HandshakeRefused, match="wrong dialer proof"):
        run(left, right, [])


def test_on_one_channel_it_succeeds() -> None:
    left, right = dialer(), acceptor()
    left.bind(b"one")
    right.bind(b"one")
    run(left, right, [])
    assert left.done


@pytest.mark.parametrize("start", TLS_STARTS)
def test_who_speaks_tls_to_one_that_does_not_is_told_apart(start: bytes) -> None:
    waiting = dialer()
    waiting.start(Purpose.CONTROL)
    for machine in (acceptor(), waiting):
        with pytest.raises(HandshakeRefused, match="speaks TLS only"):
            machine.feed(start)
