from __future__ import annotations

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.pack import pack, pack_torch
from dispatch.kernels.route import route_torch
from tests.support.dispatch_messages import header_of, layer, messages_of, spread, windows

OPERATIONS = (pack, pack_torch)


def expect_messages(operation, x, ids, slots, known, skipped=()) -> None:
    """Each message is the one due, its length is told, and nothing around it has changed."""
    hidden = x.shape[1]
    rows = [row.view(torch.uint8).numpy().tobytes() for row in x]
    due = messages_of(known, ids, rows, hidden)
    messages, offsets = windows([len(message) for message in due], skipped)
    before = messages.clone()
    num_bytes = operation(
        x, route_torch(ids, slots), slots, header=header_of(hidden),
        messages=messages, offsets=offsets,
    )  # fmt: skip
    expected = before.clone()
    for member, message in enumerate(due):
        if member in skipped:
            assert int(num_bytes[member]) == 0
            continue
        begin = int(offsets[member])
        assert int(num_bytes[member]) == len(message)
        view = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        expected[begin : begin + len(message)] = view
        # The bytes between choices and rows are nobody's.
        experts = slots.slot_bounds.diff()[member]
        filled = 64 + 4 * int(experts + route_torch(ids, slots).choice_bounds.diff()[member])
        gap = slice(begin + filled, begin + -(-filled // 64) * 64)
        expected[gap] = before[gap]
    assert torch.equal(messages, expected)


def test_the_example_of_the_docstring(interpreted) -> None:
    slots, _ = layer({0: [0, 1], 1: [2, 3]}, 4)
    ids = torch.tensor([[0, 2], [2, 3], [-1, 0]])
    x = torch.tensor([[1.0], [2.0], [3.0]])  # a b c
    for operation in OPERATIONS:
        messages = torch.zeros(512, dtype=torch.uint8)
        num_bytes = operation(
            x, route_torch(ids, slots), slots, header=header_of(1),
            messages=messages, offsets=torch.tensor([0, 256]),
        )  # fmt: skip
        assert num_bytes.tolist() == [128 + 8, 128 + 8]
        words, numbers = messages.view(torch.int32), messages.view(torch.float32)
        assert words[9:12].tolist() == [2, 2, 2]
        assert words[16:20].tolist() == [2, 0, 0, 1]
        assert numbers[32:34].tolist() == [1.0, 3.0]
        assert words[64 + 9 : 64 + 12].tolist() == [2, 3, 2]
        assert words[64 + 16 : 64 + 21].tolist() == [2, 1, 0, 1, 1]
        assert numbers[64 + 32 : 64 + 34].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "num_ranks", "hidden"),
    [
        (1, 1, 1, 1, 1),
        (5, 3, 7, 3, 7),
        (6, 4, 60, 5, 130),
        (4, 8, 257, 6, 1536),
        (3, 9, 9, 12, 64),
        (2, 40, 40, 3, 2881),
        (0, 4, 8, 3, 16),
    ],
)
def test_messages_are_those_of_the_cpu_path(
    interpreted, seed, num_tokens, topk, num_experts, num_ranks, hidden, dtype
) -> None:
    slots, known = layer(spread(num_experts, num_ranks), num_experts)
    x = torch.randn(num_tokens, hidden).to(dtype)
    ids = torch.randn(num_tokens, num_experts).topk(topk, dim=1).indices
    ids[torch.rand(num_tokens, topk) < 0.2] = -1
    for operation in OPERATIONS:
        expect_messages(operation, x, ids, slots, known)


def test_every_bit_pattern_survives(interpreted) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(8, -1)
    slots, known = layer(spread(4, 2), 4)
    ids = torch.arange(8).view(8, 1) % 4
    for operation in OPERATIONS:
        expect_messages(operation, x, ids, slots, known)


def test_members_without_a_message_are_left_out(interpreted, seed) -> None:
    slots, known = layer(spread(6, 4), 6)
    x, ids = torch.randn(9, 5), torch.randint(0, 6, (9, 3))
    for operation in OPERATIONS:
        expect_messages(operation, x, ids, slots, known, skipped=(0, 2))


@pytest.mark.parametrize("ids", [torch.full((4, 2), -1), torch.full((4, 2), 5)])
def test_all_to_nobody_and_all_to_one(interpreted, seed, ids) -> None:
    slots, known = layer(spread(7, 3), 7)
    x = torch.randn(4, 6)
    for operation in OPERATIONS:
        expect_messages(operation, x, ids, slots, known)


def test_a_view_at_an_odd_address_is_moved_in_smaller_words(interpreted, seed) -> None:
    slots, known = layer(spread(4, 2), 4)
    x = torch.randn(4 * 8 + 1).to(torch.bfloat16)[1:].view(4, 8)
    for operation in OPERATIONS:
        expect_messages(operation, x, torch.randint(0, 4, (4, 2)), slots, known)


def test_offsets_beyond_four_gibibytes(interpreted, seed) -> None:
    """Of the buffer only what is written exists."""
    slots, known = layer(spread(4, 2), 4)
    x, ids = torch.randn(3, 24), torch.randint(0, 4, (3, 2))
    far = 5 << 30
    messages = torch.empty(far + 4096, dtype=torch.uint8)
    pack(
        x, route_torch(ids, slots), slots, header=header_of(24),
        messages=messages, offsets=torch.tensor([-1, far]),
    )  # fmt: skip
    due = messages_of(known, ids, [row.view(torch.uint8).numpy().tobytes() for row in x], 24)[1]
    assert messages[far + 128 : far + len(due)].numpy().tobytes() == due[128:]


def test_wrong_input_is_named() -> None:
    slots, _ = layer(spread(4, 2), 4)
    ids = torch.randint(0, 4, (4, 2))
    good = {
        "header": header_of(6),
        "messages": torch.empty(4096, dtype=torch.uint8),
        "offsets": torch.tensor([0, 2048]),
    }
    for change, name in (
        ({"x": torch.zeros(3, 6)}, "shape of x"),
        ({"x": torch.zeros(4, 0)}, "hidden"),
        ({"x": torch.zeros(6, 4).t()}, "stride of x"),
        ({"header": torch.zeros(63, dtype=torch.uint8)}, "shape of header"),
        ({"offsets": torch.tensor([0])}, "shape of offsets"),
        ({"offsets": torch.tensor([0, 1], dtype=torch.int32)}, "dtype of offsets"),
        ({"messages": good["messages"][:100]}, "bytes of messages"),
        ({"messages": good["messages"][4:4036]}, "address of messages"),
    ):
        arguments = {"x": torch.zeros(4, 6), **good, **change}
        x, routed = arguments.pop("x"), route_torch(ids, slots)
        with pytest.raises(InputInvalid) as caught:
            pack(x, routed, slots, **arguments)
        assert caught.value.name == name
