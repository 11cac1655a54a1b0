from __future__ import annotations

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.arrange import arrange, arrange_torch
from dispatch.kernels.fp8 import ScaleFormat, num_groups, quantise_torch
from dispatch.kernels.pack import pack
from dispatch.kernels.pack_fp8 import pack_fp8
from dispatch.kernels.route import route
from dispatch.kernels.unpack import (
    ScaleLayout,
    unpack,
    unpack_scales,
    unpack_scales_torch,
    unpack_torch,
)
from tests.support.dispatch_messages import (
    arrived,
    header_of,
    layer,
    messages_of,
    raw,
    spread,
)

ROOM = 1 << 16  # of a window


def due_rows(x_of, ids_of, known, member, alignment):
    """(source, token) of each row of one member, None for padding."""
    first, last = known.slot_bounds[member : member + 2]
    rows = []
    for expert in known.slot_experts[first:last].tolist():
        for source, ids in enumerate(ids_of):
            rows += [(source, token) for token, k in (ids == expert).nonzero().tolist()]
        rows += [None] * (-len(rows) % alignment)
    return rows


def test_the_example_of_the_docstring(interpreted) -> None:
    _, known = layer({0: [0, 1]}, 2)
    one, two = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
    messages = [
        messages_of(known, torch.tensor([[0, 1], [0, -1]]), raw(one), 2, source=0)[0],
        messages_of(known, torch.tensor([[0]]), raw(two), 2, source=1)[0],
    ]
    buffer, offsets, room = arrived(messages)
    arranged = arrange_torch(
        buffer, offsets, header=header_of(2), ranks=torch.tensor([0, 1], dtype=torch.int32),
        num_experts=2, window_bytes=room, row_bytes=8, alignment=2, capacity=8,
    )  # fmt: skip
    for operation in (unpack, unpack_torch):
        rows = operation(buffer, arranged, hidden=2, dtype=torch.float32)
        assert rows.shape == (8, 2)
        assert rows[:6].tolist() == [[1, 2], [3, 4], [5, 6], [0, 0], [1, 2], [0, 0]]


def exchange(x_of, ids_of, slots, member, *, scale_format=None):
    """Pack on every source and lay its message for one member into that member's window."""
    messages = torch.randint(0, 256, (len(x_of) * ROOM,), dtype=torch.uint8)
    begins = torch.arange(len(x_of)) * ROOM
    for source, (x, ids) in enumerate(zip(x_of, ids_of, strict=True)):
        offsets = torch.full((slots.num_members,), -1)
        offsets[member] = begins[source]
        header = header_of(x.shape[1])
        header.view(torch.int32)[8] = source
        options = {"header": header, "messages": messages, "offsets": offsets}
        if scale_format is None:
            pack(x, route(ids, slots), slots, **options)
        else:
            pack_fp8(x, route(ids, slots), slots, **options, scale_format=scale_format)
    return messages, begins


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "topk", "num_experts", "hidden", "alignment"),
    [(1, 3, 2, 3, 7, 1), (3, 4, 3, 7, 130, 8), (5, 1, 6, 9, 1025, 64), (2, 0, 2, 2, 16, 128)],
)
def test_rows_come_out_where_their_experts_are(
    interpreted, seed, num_ranks, num_tokens, topk, num_experts, hidden, alignment, dtype
) -> None:
    slots, known = layer(spread(num_experts, num_ranks), num_experts)
    x_of = [torch.randn(num_tokens, hidden).to(dtype) for _ in range(num_ranks)]
    ids_of = [torch.randint(-1, num_experts, (num_tokens, topk)) for _ in range(num_ranks)]
    member = num_ranks - 1
    held = known.slot_bounds[member + 1] - known.slot_bounds[member]
    messages, begins = exchange(x_of, ids_of, slots, member)
    arranged = arrange(
        messages, begins, header=header_of(hidden),
        ranks=torch.arange(num_ranks, dtype=torch.int32), num_experts=held, window_bytes=ROOM,
        row_bytes=hidden * dtype.itemsize, alignment=alignment,
        capacity=num_ranks * num_tokens * topk + held * alignment,
    )  # fmt: skip
    assert not arranged.faults.any()
    due = due_rows(x_of, ids_of, known, member, alignment)
    assert int(arranged.bounds[-1]) == len(due)
    zeros = torch.zeros(hidden, dtype=dtype)
    for operation in (unpack, unpack_torch):
        rows = operation(messages, arranged, hidden=hidden, dtype=dtype)
        expected = [zeros if at is None else x_of[at[0]][at[1]] for at in due]
        assert raw(rows[: len(due)]) == raw(expected)


@pytest.mark.parametrize("scale_layout", list(ScaleLayout))
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
@pytest.mark.parametrize("hidden", [1, 130, 1024])
def test_fp8_rows_and_their_scales_stay_together(
    interpreted, seed, hidden, scale_format, scale_layout
) -> None:
    slots, known = layer(spread(5, 2), 5)
    x_of = [(torch.randn(4, hidden) * 5).to(torch.bfloat16) for _ in range(2)]
    ids_of = [torch.randint(-1, 5, (4, 3)) for _ in range(2)]
    held, groups = known.slot_bounds[1], num_groups(hidden)
    messages, begins = exchange(x_of, ids_of, slots, 0, scale_format=scale_format)
    arranged = arrange(
        messages, begins, header=header_of(hidden), ranks=torch.arange(2, dtype=torch.int32),
        num_experts=held, window_bytes=ROOM, row_bytes=hidden,
        scale_bytes=groups * scale_format.dtype.itemsize, alignment=4, capacity=41,
    )  # fmt: skip
    narrow_of = [quantise_torch(x, scale_format) for x in x_of]
    due = due_rows(x_of, ids_of, known, 0, 4)
    for rows_of, scales_of in ((unpack, unpack_scales), (unpack_torch, unpack_scales_torch)):
        rows = rows_of(messages, arranged, hidden=hidden, dtype=torch.float8_e4m3fn)
        scales = scales_of(
            messages, arranged, hidden=hidden, scale_format=scale_format, scale_layout=scale_layout
        )
        assert scales.shape == (41, groups)
        per_step = 16 // scale_format.dtype.itemsize
        stride = -(-41 // per_step) * per_step
        by_row = scale_layout is ScaleLayout.ROW
        assert scales.stride() == ((groups, 1) if by_row else (1, stride))
        for row, at in enumerate(due):
            if at is None:
                assert not rows[row].float().any()
                assert (scales[row] == (1 if scale_format is ScaleFormat.FP32 else 127)).all()
            else:
                narrow, factors = narrow_of[at[0]]
                assert raw(rows[row : row + 1]) == raw(narrow[at[1] : at[1] + 1])
                assert torch.equal(scales[row], factors[at[1]])


def test_few_programs_share_many_rows(interpreted, seed, monkeypatch) -> None:
    monkeypatch.setattr("dispatch.kernels.pack.PROGRAMS", 3)
    monkeypatch.setattr("dispatch.kernels.unpack.ROWS_OF_SCALES", 4)
    slots, _ = layer(spread(3, 1), 3)
    x, ids = torch.randn(11, 300), torch.randint(0, 3, (11, 2))
    messages, begins = exchange([x], [ids], slots, 0, scale_format=ScaleFormat.FP32)
    arranged = arrange_torch(
        messages, begins, header=header_of(300), ranks=torch.zeros(1, dtype=torch.int32),
        num_experts=3, window_bytes=ROOM, row_bytes=300, scale_bytes=12, alignment=8, capacity=64,
    )  # fmt: skip
    used, narrow = int(arranged.bounds[-1]), torch.float8_e4m3fn
    rows = [f(messages, arranged, hidden=300, dtype=narrow) for f in (unpack, unpack_torch)]
    assert raw(rows[0][:used]) == raw(rows[1][:used])
    scales = [f(messages, arranged, hidden=300) for f in (unpack_scales, unpack_scales_torch)]
    assert torch.equal(scales[0][:used], scales[1][:used])


def test_an_experts_rows_do_not_depend_on_the_number_of_ranks(interpreted, seed) -> None:
    """The same tokens from 1, 2 and 4 ranks, in order, with the experts spread over them."""
    x, ids = torch.randn(8, 6), torch.randint(-1, 7, (8, 3))
    found = []
    for num_ranks in (1, 2, 4):
        slots, known = layer(spread(7, num_ranks), 7)
        experts = {}
        for member in range(num_ranks):
            messages, begins = exchange(x.chunk(num_ranks), ids.chunk(num_ranks), slots, member)
            first, last = known.slot_bounds[member : member + 2]
            arranged = arrange(
                messages, begins, header=header_of(6),
                ranks=torch.arange(num_ranks, dtype=torch.int32), num_experts=last - first,
                window_bytes=ROOM, row_bytes=24, capacity=24,
            )  # fmt: skip
            rows = unpack(messages, arranged, hidden=6, dtype=torch.float32)
            for index, expert in enumerate(known.slot_experts[first:last].tolist()):
                begin, end = arranged.bounds[index : index + 2].tolist()
                experts[expert] = raw(rows[begin:end])
        found.append(experts)
    assert found[0] == found[1] == found[2]


def test_wrong_input_is_named() -> None:
    messages = torch.zeros(64, dtype=torch.uint8)
    arranged = arrange_torch(
        messages, torch.tensor([-1]), header=header_of(4),
        ranks=torch.zeros(1, dtype=torch.int32), num_experts=1, window_bytes=64, row_bytes=8,
        capacity=2,
    )  # fmt: skip
    for buffer, hidden, dtype, name in (
        (messages[:8], 4, torch.bfloat16, "bytes of messages"),
        (messages, 0, torch.bfloat16, "hidden"),
        (messages, 4, torch.int32, "dtype"),
    ):
        with pytest.raises(InputInvalid) as caught:
            unpack(buffer, arranged, hidden=hidden, dtype=dtype)
        assert caught.value.name == name
