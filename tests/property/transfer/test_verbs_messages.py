"""What RDMA peers tell each other, and how pieces become work requests; needs no device."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.backends.verbs import messages
from transfer.backends.verbs.plan import plan
from transfer.errors import ProtocolViolation
from transfer.wire import Status

NUMBERS = st.integers(0, messages.QUEUE_NUMBERS - 1)
PAIRS = st.tuples(NUMBERS, NUMBERS)
TOKENS = st.binary(min_size=16, max_size=16)
ENDS = st.builds(
    messages.End,
    gid=st.ip_addresses(v=6).map(str),
    lid=st.integers(0, 65535),
    mtu=st.integers(1, 5),
    reads=st.integers(0, 255),
    numbers=PAIRS,
    sequence=PAIRS,
)
MESSAGES = st.one_of(
    st.builds(messages.OpenRail, rail=st.integers(0, 1 << 40), device=st.integers(0, 99), end=ENDS),
    st.builds(
        messages.RailOpened, rail=st.integers(0, 1 << 40), end=ENDS, credits=st.integers(1, 9999)
    ),
    st.builds(messages.Settle, rail=st.integers(0, 1 << 40), token=st.one_of(st.just(b""), TOKENS)),
    st.builds(
        messages.Settled,
        rail=st.integers(0, 1 << 40),
        arrived=PAIRS,
        status=st.sampled_from(Status),
    ),
    st.builds(messages.KeyTold, token=TOKENS, places=st.lists(PAIRS, max_size=4).map(tuple)),
    st.builds(messages.AskKey, token=TOKENS),
)


@given(MESSAGES)
def test_messages_survive_the_wire(message: messages.Message) -> None:
    assert messages.parse(messages.encode(message)) == message


@given(st.binary(max_size=200))
def test_nonsense_is_refused(data: bytes) -> None:
    try:
        messages.parse(data)
    except ProtocolViolation:
        return


@given(MESSAGES, st.data())
def test_a_changed_message_is_refused_or_one(
    message: messages.Message, data: st.DataObject
) -> None:
    content = bytearray(messages.encode(message))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    try:
        messages.parse(bytes(content))
    except ProtocolViolation:
        return


@pytest.mark.parametrize(
    "change",
    [{"mtu": 9}, {"gid": "x"}, {"numbers": (1, 2, 3)}, {"sequence": (1, 1 << 24)}, {"reads": -1}],
)
def test_attributes_out_of_range_are_refused(change: dict[str, object]) -> None:
    end = messages.End(gid="::1", lid=0, mtu=3, reads=4, numbers=(1, 2), sequence=(3, 4))
    wrong = msgspec.structs.replace(end, **change)
    with pytest.raises(ProtocolViolation):
        messages.parse(messages.encode(messages.OpenRail(1, 0, wrong)))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=80),
    st.integers(1, 7),
)
def test_requests_cover_the_pieces_in_order(pieces: list[tuple[int, int]], most: int) -> None:
    """Against a loop: the same bytes at the same places, joined as far as the card can."""
    gaps, lengths = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    remote = np.cumsum(gaps) + np.cumsum(lengths) - lengths
    local = np.arange(len(lengths), dtype=np.int64) * 1000
    requests = plan(local, remote, lengths, most)
    expected: list[tuple[int, list[int]]] = []
    for i in range(len(lengths)):
        joins = i > 0 and remote[i] == remote[i - 1] + lengths[i - 1]
        if joins and len(expected[-1][1]) < most:
            expected[-1][1].append(i)
        else:
            expected.append((int(remote[i]), [i]))
    assert requests.remote.tolist() == [start for start, _ in expected]
    assert np.diff(requests.first).tolist() == [len(members) for _, members in expected]
    assert requests.first[-1] == len(lengths)
    assert requests.local.tolist() == local.tolist()
    assert requests.lengths.tolist() == lengths.tolist()
