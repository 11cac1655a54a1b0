from __future__ import annotations

import math

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.fp8 import ScaleFormat, quantise_torch
from dispatch.kernels.pack_fp8 import pack_fp8, pack_fp8_torch
from dispatch.kernels.route import route_torch
from tests.support.dispatch_messages import header_of, layer, messages_of, spread, windows

OPERATIONS = (pack_fp8, pack_fp8_torch)
FORMATS = tuple(ScaleFormat)


def raw(tensor):
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in tensor]


def without_gap(message: bytes, num_rows: int, hidden: int, filled: int) -> tuple[bytes, ...]:
    """Head and choices, rows, scales; without the bytes between them, which are nobody's."""
    rows = -(-filled // 64) * 64
    scales = -(-(rows + num_rows * hidden) // 64) * 64
    return message[:filled], message[rows : rows + num_rows * hidden], message[scales:]


def expect_messages(operation, x, ids, slots, known, scale_format, skipped=()) -> None:
    hidden = x.shape[1]
    rows, scales = quantise_torch(x, scale_format)
    due = messages_of(known, ids, raw(rows), hidden, raw(scales))
    messages, offsets = windows([len(message) for message in due], skipped)
    before, routed = messages.clone(), route_torch(ids, slots)
    num_bytes = operation(
        x, routed, slots, header=header_of(hidden), messages=messages, offsets=offsets,
        scale_format=scale_format,
    )  # fmt: skip
    for member, message in enumerate(due):
        if member in skipped:
            assert int(num_bytes[member]) == 0
            continue
        assert int(num_bytes[member]) == len(message)
        begin = int(offsets[member])
        found = messages[begin : begin + len(message)].numpy().tobytes()
        num_choices = int(routed.choice_bounds.diff()[member])
        filled = 64 + 4 * (int(slots.slot_bounds.diff()[member]) + num_choices)
        cut = int(routed.row_bounds.diff()[member]), hidden, filled
        assert without_gap(found, *cut) == without_gap(message, *cut)
        before[begin : begin + len(message)] = messages[begin : begin + len(message)]
    assert torch.equal(messages, before)  # nothing outside


def test_the_example_of_the_docstring(interpreted) -> None:
    slots, _ = layer({0: [0]}, 1)
    x, ids = torch.tensor([[1.0, -2.0]]), torch.tensor([[0]])
    for operation in OPERATIONS:
        messages = torch.zeros(512, dtype=torch.uint8)
        num_bytes = operation(
            x, route_torch(ids, slots), slots, header=header_of(2),
            messages=messages, offsets=torch.tensor([0]),
        )  # fmt: skip
        assert num_bytes.tolist() == [64 + 64 + 64 + 4]
        assert messages[128:130].tolist() == [0x76, 0xFE]  # 224 and -448
        assert messages.view(torch.float32)[48].item() == pytest.approx(2 / 448)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "num_ranks", "hidden"),
    [
        (1, 1, 1, 1, 1),
        (5, 3, 7, 3, 7),
        (4, 8, 257, 6, 1536),
        (3, 9, 9, 12, 129),
        (2, 40, 40, 3, 2881),
        (0, 4, 8, 3, 16),
    ],
)
def test_messages_hold_what_fp8_makes_of_the_rows(
    interpreted, seed, num_tokens, topk, num_experts, num_ranks, hidden, scale_format
) -> None:
    slots, known = layer(spread(num_experts, num_ranks), num_experts)
    x = (torch.randn(num_tokens, hidden) * 10).to(torch.bfloat16)
    ids = torch.randn(num_tokens, num_experts).topk(topk, dim=1).indices
    ids[torch.rand(num_tokens, topk) < 0.2] = -1
    for operation in OPERATIONS:
        expect_messages(operation, x, ids, slots, known, scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_rows_that_are_not_numbers(interpreted, scale_format) -> None:
    slots, known = layer(spread(4, 2), 4)
    x = torch.tensor([[0.0] * 130, [math.nan] * 130, [math.inf] * 130, [1e-40] * 130])
    for operation in OPERATIONS:
        ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
        expect_messages(operation, x, ids, slots, known, scale_format, skipped=(1,))


def test_wrong_input_is_named() -> None:
    slots, _ = layer(spread(4, 2), 4)
    routed = route_torch(torch.zeros(4, 2, dtype=torch.int64), slots)
    with pytest.raises(InputInvalid) as caught:
        pack_fp8(
            torch.zeros(4, 6, dtype=torch.float8_e4m3fn), routed, slots, header=header_of(6),
            messages=torch.zeros(64, dtype=torch.uint8), offsets=torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip
    assert caught.value.name == "dtype of x"
