"""Handshakes under an attacker who owns the network: it records, cuts, replays, mirrors, alters.

The attacker does not know the secret. Whatever it does, a side that ends as `done` has talked,
step by step, with exactly one partner of its own conversation, and nothing private was told to
anybody else.

A second one, mallory, is a member: it knows the secret and takes part under its own name, but the
wires between others are not its own. It tries to open and to answer further connections of the
others under their names.
"""

from __future__ import annotations

import secrets

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transfer.connections.handshake import (
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    AcceptorHandshake,
    DialerHandshake,
    Facts,
    Handshake,
    Purpose,
)
from transfer.errors import HandshakeRefused, ProtocolViolation

SECRET = secrets.token_bytes(32)
NAMES = ("anna", "bert", "carl")
MEMBER = "mallory"
FURTHER = tuple(purpose for purpose in Purpose if purpose is not Purpose.CONTROL)


def facts_of(name: str) -> Facts:
    return Facts(
        address=f"127.0.0.1:{len(name)}", host=f"host-{name}", local_socket=f"private-{name}",
        shared_memory=True, tcp=True,
    )  # fmt: skip


class Side:
    """One machine, what it said, and whether it has hung up."""

    def __init__(self, machine: Handshake, table: dict[str, bytes]) -> None:
        self.machine = machine
        self.table = table
        self.nonce = machine._nonce
        self.said: list[bytes] = []
        self.heard = b""
        self.over = False

    def hear(self, data: bytes) -> None:
        while data and not self.over and not self.machine.done:
            portion, data = data[: self.machine.needed], data[self.machine.needed :]
            self.heard += portion
            try:
                answer = self.machine.feed(portion)
            except (HandshakeRefused, ProtocolViolation):
                self.over = True
                return
            if answer:
                self.said.append(answer)
            if isinstance(self.machine, AcceptorHandshake) and self.machine.done:
                self.said.append(self.machine.ready())
        if self.machine.done and self.machine.purpose is Purpose.CONTROL:
            self.table[self.machine.peer_name] = self.machine.session


def converse(left: Side, right: Side) -> None:
    """Carry every word of two sides to the other one."""
    speaker, listener = left, right
    heard = {id(left): 0, id(right): 0}
    while heard[id(speaker)] < len(speaker.said):
        while heard[id(speaker)] < len(speaker.said):
            listener.hear(speaker.said[heard[id(speaker)]])
            heard[id(speaker)] += 1
        speaker, listener = listener, speaker


class AttackedHandshakes(RuleBasedStateMachine):
    """Any number of conversations between three engines, all over the attacker's wires."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Side] = []
        self.recorded: list[bytes] = []
        self.member_sides: list[Side] = []
        self.tables: dict[str, dict[str, bytes]] = {name: {} for name in (*NAMES, MEMBER)}

    def collect(self, side: Side) -> None:
        self.recorded += [m for m in side.said if m not in self.recorded]

    @initialize()
    def begin(self) -> None:
        self.dial("anna", Purpose.CONTROL)
        self.accept("bert")

    @rule(name=st.sampled_from(NAMES), purpose=st.sampled_from(Purpose))
    def dial(self, name: str, purpose: Purpose) -> None:
        side = self.dialer(name, purpose, self.tables[name])
        self.sides.append(side)
        self.collect(side)

    @rule(name=st.sampled_from(NAMES))
    def accept(self, name: str) -> None:
        self.sides.append(self.acceptor(name, self.tables[name]))

    def dialer(self, name: str, purpose: Purpose, table: dict[str, bytes]) -> Side:
        machine = DialerHandshake(
            secret=SECRET, name=name, facts=facts_of(name), admit=lambda *_: None,
            sessions=table.get,
        )  # fmt: skip
        side = Side(machine, table)
        side.said.append(machine.start(purpose))
        return side

    def acceptor(self, name: str, table: dict[str, bytes]) -> Side:
        machine = AcceptorHandshake(
            secret=SECRET, name=name, facts=facts_of(name), admit=lambda *_: None,
            sessions=table.get,
        )  # fmt: skip
        return Side(machine, table)

    @rule(pair=st.permutations(NAMES), purpose=st.sampled_from(Purpose))
    def talk_in_peace(self, pair: list[str], purpose: Purpose) -> None:
        """A whole conversation: further connections come about where a control one stands."""
        one, two = pair[:2]
        left = self.dialer(one, purpose, self.tables[one])
        right = self.acceptor(two, self.tables[two])
        self.sides += [left, right]
        expected = purpose is Purpose.CONTROL or (
            self.tables[one].get(two) is not None
            and self.tables[one].get(two) == self.tables[two].get(one)
        )
        converse(left, right)
        self.collect(left)
        self.collect(right)
        assert (left.machine.done, right.machine.done) == (expected, expected)
        if purpose is Purpose.CONTROL:
            assert left.machine.session == right.machine.session != b""

    @rule(name=st.sampled_from(NAMES), calls=st.booleans())
    def member_takes_part(self, name: str, calls: bool) -> None:
        """Under its own name, which is its right."""
        if calls:
            left = self.dialer(MEMBER, Purpose.CONTROL, self.tables[MEMBER])
            right = self.acceptor(name, self.tables[name])
        else:
            left = self.dialer(name, Purpose.CONTROL, self.tables[name])
            right = self.acceptor(MEMBER, self.tables[MEMBER])
        self.sides.append(right if calls else left)
        self.member_sides.append(left if calls else right)
        converse(left, right)
        assert left.machine.done
        assert right.machine.done

    @rule(
        pair=st.permutations(NAMES),
        purpose=st.sampled_from(FURTHER),
        calls=st.booleans(),
        data=st.data(),
    )
    def member_under_a_false_name(
        self, pair: list[str], purpose: Purpose, calls: bool, data: st.DataObject
    ) -> None:
        """With any session key that it was ever told, or a guess."""
        victim, false = pair[:2]
        known = [*self.tables[MEMBER].values(), secrets.token_bytes(32), b""]
        told = data.draw(st.sampled_from(known))
        lies = dict.fromkeys(NAMES, told)
        table = self.tables[victim]
        if calls:
            left, right = self.dialer(false, purpose, lies), self.acceptor(victim, table)
        else:
            left, right = self.dialer(victim, purpose, table), self.acceptor(false, lies)
        honest, evil = (right, left) if calls else (left, right)
        evil.machine._check = lambda *_: None  # type: ignore[method-assign]
        self.sides.append(honest)
        self.member_sides.append(evil)
        converse(left, right)
        assert honest.over
        assert not honest.machine.done
        assert honest.machine.peer_facts is None

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Any recorded message to any side: in order, out of order, again, or to its author."""
        side = data.draw(st.sampled_from(self.sides))
        side.hear(data.draw(st.sampled_from(self.recorded)))
        self.collect(side)

    @rule(data=st.data())
    def honest_turn(self, data: st.DataObject) -> None:
        """The latest words of one side to another: so that conversations do get somewhere."""
        speaker = data.draw(st.sampled_from([s for s in self.sides if s.said] or self.sides))
        listener = data.draw(st.sampled_from(self.sides))
        if speaker.said and speaker is not listener:
            listener.hear(speaker.said[-1])
            self.collect(listener)

    @rule(data=st.data(), at=st.integers(0, 400), bit=st.integers(0, 7), cut=st.booleans())
    def alter(self, data: st.DataObject, at: int, bit: int, cut: bool) -> None:
        message = bytearray(data.draw(st.sampled_from(self.recorded)))
        if cut:
            message = message[: at % len(message)]
        else:
            message[at % len(message)] ^= 1 << bit
        side = data.draw(st.sampled_from(self.sides))
        side.hear(bytes(message))
        self.collect(side)

    @rule(data=st.data(), noise=st.binary(max_size=300), framed=st.booleans())
    def babble(self, data: st.DataObject, noise: bytes, framed: bool) -> None:
        side = data.draw(st.sampled_from(self.sides))
        side.hear(len(noise).to_bytes(LENGTH_BYTES, "big") + noise if framed else noise)
        self.collect(side)

    @invariant()
    def who_is_done_has_one_true_partner(self) -> None:
        for side in self.sides:
            if not side.machine.done or side.machine.peer_facts is None:
                continue
            known_as = side.machine.peer_name
            partners = [
                other
                for other in (self.member_sides if known_as == MEMBER else self.sides)
                if other is not side
                and type(other.machine) is not type(side.machine)
                and other.machine._transcript == side.machine._transcript
            ]
            assert len(partners) == 1
            partner = partners[0]
            assert side.machine.peer_name == partner.machine._name
            assert side.machine.peer_facts == facts_of(side.machine.peer_name)
            assert side.machine.purpose == partner.machine.purpose
            assert partner.machine.peer_facts is not None

    @invariant()
    def nothing_private_is_told_before_proof(self) -> None:
        """An acceptor that was not proved to has said its name and its nonce, no more."""
        for side in self.sides:
            if isinstance(side.machine, AcceptorHandshake) and not side.machine.accepted:
                told = b"".join(side.said)
                assert b"private-" not in told
                assert len(told) < 64 + len(side.machine._name)
            elif side.machine.peer_facts is None and isinstance(side.machine, DialerHandshake):
                assert not any(b"private-" in message for message in side.said)

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        assert all(len(s.machine._buffer) <= MESSAGE_BYTES_MAX + 2 for s in self.sides)

    @invariant()
    def no_nonce_is_used_twice(self) -> None:
        nonces = [side.nonce for side in self.sides]
        assert len(set(nonces)) == len(nonces)


TestAttackedHandshakes = AttackedHandshakes.TestCase
TestAttackedHandshakes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
