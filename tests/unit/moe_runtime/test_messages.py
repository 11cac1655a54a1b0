from __future__ import annotations

import pytest

from moe_runtime.messages import (
    Cancel,
    Drain,
    Goodbye,
    Hello,
    Load,
    MessageInvalid,
    Stop,
    Submit,
    TokenItem,
    Tokens,
    ViewCommitted,
    decode_front_message,
    decode_worker_message,
    encode,
)

FROM_WORKER = [
    Hello(incarnation="a" * 16, rank=2, epoch=0, max_context_tokens=512, kv_pages=32),
    Tokens(
        incarnation="a" * 16,
        items=[
            TokenItem(request_id="r.1", index=0, token_ids=[1, 2], cached_tokens=16),
            TokenItem(request_id="r.2", index=9, token_ids=[], finish_reason="error", error="no"),
        ],
    ),
    Load(
        incarnation="b",
        running=1,
        waiting=0,
        free_pages=3,
        num_pages=4,
        epoch=7,
        counters={"passes": 3.0},
    ),
    ViewCommitted(incarnation="b", view=b"{}", members=["a", "b"], epoch=8),
    Goodbye(incarnation="b"),
]
FROM_FRONT = [
    Submit(
        request_id="r.1",
        prompt_ids=[5, 6],
        output_ids=[7],
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        seed=2**63 - 1,
        max_tokens=16,
        stop_token_ids=[2],
        ignore_eos=False,
        min_tokens=0,
    ),
    Cancel(request_id="r.1"),
    Drain(),
    Stop(),
]


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda m: type(m).__name__)
def test_worker_messages_survive_the_wire(message):
    assert decode_worker_message(encode(message)) == message


@pytest.mark.parametrize("message", FROM_FRONT, ids=lambda m: type(m).__name__)
def test_front_messages_survive_the_wire(message):
    assert decode_front_message(encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", encode(Stop())])
def test_bytes_of_no_worker_message_are_a_typed_error(data):
    with pytest.raises(MessageInvalid) as caught:
        decode_worker_message(data)
    assert caught.value.direction == "worker"
    assert caught.value.fields["nbytes"] == len(data)


def test_a_worker_message_is_no_front_message():
    with pytest.raises(MessageInvalid):
        decode_front_message(encode(FROM_WORKER[0]))


def test_negative_index_is_refused():
    item = TokenItem(request_id="r", index=-1, token_ids=[1])
    with pytest.raises(MessageInvalid, match=">= 0"):
        decode_worker_message(encode(Tokens(incarnation="a", items=[item])))
