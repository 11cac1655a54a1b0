"""Windows that are too small: what is sent instead of the message, and how they grow."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from dispatch import MessageMismatch, PassFailed
from dispatch.growth import (
    KEY_BYTES_MAX,
    NOTE_BYTES_MAX,
    append_grant,
    grown_bytes,
    read_grant,
    read_note,
    with_grant,
    write_note,
)
from dispatch.layout import HEADER_BYTES
from dispatch.message import GRANT, SPILLED, Stamp, mark, marks_of, write_header
from dispatch.windows import expected_choices, window_sizes
from tests.support.dispatch_pair import LAYOUT, both, install, pair
from tests.support.moe_reference import draw_tokens, reference, run_experts
from transfer import PeerLost, RegionKey

KEY = RegionKey(owner="two", token=bytes(16), nbytes=4096, rights=1, shareable=True)
SHARED = Stamp(3, 0, 1, 0).header(torch.bfloat16, 64)
WIDE = dataclasses.replace(LAYOUT, hidden=256, max_tokens=40, microbatches=2)


def message(nbytes: int = 1024) -> np.ndarray:
    buffer = np.zeros(max(with_grant(nbytes), NOTE_BYTES_MAX), np.uint8)
    write_header(buffer, SHARED, 5, 4, 9, 6)
    return buffer


def test_notes_and_grants_round_trip():
    sent, note = message(3000), message()
    assert marks_of(sent) == (0, 0)
    nbytes = append_grant(sent, 3000, KEY)
    assert 3008 < nbytes <= with_grant(3000)
    assert marks_of(sent) == (GRANT, 3008)
    assert read_grant(sent, SHARED, source=5, owner="two") == KEY
    assert HEADER_BYTES < write_note(note, sent, nbytes, KEY) <= NOTE_BYTES_MAX
    assert marks_of(note) == (SPILLED, nbytes)
    assert read_note(note, SHARED, source=5, owner="two", largest=4096) == (KEY, nbytes)
    assert marks_of(sent) == (GRANT, 3008), "the message itself is not marked as spilled"


def spoil_length(buffer):
    buffer[HEADER_BYTES : HEADER_BYTES + 2] = 0xFF


SPOILED = {
    "larger than the layout allows": lambda b: mark(b, SPILLED, 4097),
    "smaller than a header": lambda b: mark(b, SPILLED, 63),
    "larger than its key": lambda b: mark(b, SPILLED, 4096 + 64),
    "another phase": lambda b: write_header(b, SHARED[:-1] + b"\xff", 5, 4, 9, 6),
    "no key": lambda b: b[HEADER_BYTES + 2 :].fill(0xC1),
    "length beyond the window": spoil_length,
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_spoiled_notes_are_refused(spoil):
    note = message()
    write_note(note, message(), 1024, KEY)
    spoil(note)
    with pytest.raises(MessageMismatch):
        read_note(note, SHARED, source=5, owner="two", largest=4096)


def test_keys_of_others_are_refused():
    note = message()
    write_note(note, message(), 1024, KEY)
    with pytest.raises(MessageMismatch, match="owner"):
        read_note(note, SHARED, source=5, owner="three", largest=4096)
    grant = message()
    append_grant(grant, 1024, KEY)
    mark(grant, GRANT, len(grant) - 1)
    with pytest.raises(MessageMismatch):
        read_grant(grant, SHARED, source=5, owner="two")


def test_sizes():
    assert grown_bytes(1025, 1 << 20) == 2048
    assert grown_bytes(1025, 1500) == 1500
    assert len(KEY.encode()) + 64 * 4 < KEY_BYTES_MAX, "the longest name, in any script"
    assert expected_choices(LAYOUT, 2, tokens=None, slack=2.0) == LAYOUT.choices_max
    assert expected_choices(LAYOUT, 4, tokens=3, slack=1.0) == 2  # 3 * 2 / 4, rounded up
    compact, full = window_sizes(WIDE, 5, 1), window_sizes(WIDE, 5)
    assert len(compact) == 4
    assert all(small < large for small, large in zip(compact, full, strict=True))
    assert min(window_sizes(dataclasses.replace(LAYOUT, hidden=1), 1, 0)) == NOTE_BYTES_MAX


def checked(dispatcher, seed: int, num_tokens: int, microbatch: int = 0, hot=None) -> int:
    """Run a pass of two layers on random tokens; return how many windows have grown so far."""
    generator = torch.Generator().manual_seed(seed)
    dispatcher.begin_pass()
    for layer in (0, 1):
        x, ids, weights = draw_tokens(WIDE, num_tokens, generator, masked=0.0, hot=hot)
        outgoing = dispatcher.dispatch_send(x, ids, weights, layer=layer, microbatch=microbatch)
        arrived, handle = dispatcher.dispatch_recv(outgoing)
        result = run_experts(arrived.rows, arrived.counts, arrived.experts, layer)
        out = dispatcher.combine(result, handle)
        assert torch.equal(out, reference(x, ids, weights, layer))
    dispatcher.end_pass()
    return dispatcher.statistics().grown_windows


def test_skewed_routing_is_right_at_once_and_grows_the_window_once():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with pair(layouts=(WIDE, WIDE), window_slack=0.05) as dispatchers:
        install(dispatchers, 1)

        def step(number: int, counts, microbatch: int = 0):
            outcomes = both(
                *(
                    # All choices of a rank are for an expert of the other.
                    lambda d=d, n=n, r=r: checked(d, seed + number, n, microbatch, 0 if r else 4)
                    for r, (d, n) in enumerate(zip(dispatchers, counts, strict=True))
                )
            )
            assert all(isinstance(outcome, int) for outcome in outcomes), outcomes
            return outcomes

        assert step(0, (1, 0)) == (0, 0), "the common case fits"
        # Rank 0's rows do not fit at rank 1, nor do their results on the way back.
        assert step(1, (40, 0)) == (1, 1)
        assert step(2, (40, 0)) == (1, 1), "grown once"
        assert step(3, (40, 40)) == (2, 2), "now the other direction"
        assert step(4, (40, 40)) == (2, 2)
        assert step(5, (40, 40), 1) == (4, 4), "the other microbatch has windows of its own"
        assert step(6, (3, 40)) == (4, 4)
        offers = dispatchers[0]._engine.statistics().offers
        install(dispatchers, 2)
        assert dispatchers[0]._engine.statistics().offers == 1 < offers, "withdrawn with the epoch"
        assert step(7, (40, 40)) == (6, 6), "the new epoch started compact"


def test_windows_grow_step_by_step():
    sizes = (2, 5, 11, 23, 40)
    with pair(layouts=(WIDE, WIDE), window_slack=0.05) as dispatchers:
        install(dispatchers, 1)
        for n in sizes * 2:
            outcomes = both(*(lambda d=d, n=n: checked(d, n, n) for d in dispatchers))
            assert all(isinstance(outcome, int) for outcome in outcomes), outcomes
        assert 4 <= outcomes[0] <= 2 * len(sizes)


def test_a_sender_that_is_lost_before_its_message_was_read_is_named(monkeypatch):
    with pair(layouts=(WIDE, WIDE), window_slack=0.05) as (first, second):
        install((first, second), 1)
        read = []

        def lost(*args, **kwargs):
            read.append(args)
            raise PeerLost(args[0], "reset")

        monkeypatch.setattr(second._engine, "read", lost)
        for dispatcher in (first, second):
            dispatcher.begin_pass()
        tokens = draw_tokens(WIDE, 40, torch.Generator(), masked=0.0)
        first.dispatch_send(*tokens, layer=0)
        outgoing = second.dispatch_send(*draw_tokens(WIDE, 0, torch.Generator()), layer=0)
        with pytest.raises(PassFailed) as caught:
            second.dispatch_recv(outgoing)
        assert read
        assert caught.value.suspects == (0,)
        monkeypatch.undo()
        install((first, second), 2)
        outcomes = both(lambda: checked(first, 1, 40), lambda: checked(second, 2, 40))
        assert min(outcomes) >= 2, "and the next epoch is well"
