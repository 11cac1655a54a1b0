from __future__ import annotations

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.arrange import arrange, arrange_torch
from dispatch.kernels.arranged import Fault
from tests.support.dispatch_messages import arrived, header_of, layer, messages_of, raw, spread

OPERATIONS = (arrange, arrange_torch)
HIDDEN = 3


def from_sources(all_ids, known, member, present=None):
    """What each source sends to one member, in fp32 rows that are never looked at."""
    found = []
    for source, ids in enumerate(all_ids):
        rows = raw(torch.zeros(len(ids), HIDDEN))
        message = messages_of(known, ids, rows, HIDDEN, source=source)[member]
        found.append(message if present is None or present[source] else None)
    return found


def arranged_by(operation, messages, num_experts, *, alignment=1, capacity=400, **changes):
    buffer, offsets, room = arrived(messages)
    arguments = {
        "header": header_of(HIDDEN),
        "ranks": torch.arange(len(messages), dtype=torch.int32),
        "num_experts": num_experts,
        "window_bytes": room,
        "row_bytes": 4 * HIDDEN,
        "alignment": alignment,
        "capacity": capacity,
    }
    return operation(buffer, offsets, **{**arguments, **changes}), buffer, offsets


def expect(found, messages, offsets, num_experts, alignment) -> None:
    """Compare with the messages read number by number."""
    experts = [[] for _ in range(num_experts)]
    places, source_bounds = [], [0]
    for source, message in enumerate(messages):
        places.append([])
        if message is not None:
            words = torch.frombuffer(bytearray(message), dtype=torch.int32)[: len(message) // 4]
            rows_at = 64 + -(-4 * (num_experts + int(words[10])) // 64) * 64
            choice = 16 + num_experts
            for expert in range(num_experts):
                for _ in range(int(words[16 + expert])):
                    at = int(offsets[source]) + rows_at + int(words[choice]) * 4 * HIDDEN
                    places[-1].append((expert, len(experts[expert])))
                    experts[expert].append(at)
                    choice += 1
        source_bounds.append(source_bounds[-1] + len(places[-1]))
    bounds = [0]
    for rows in experts:
        bounds.append(bounds[-1] + -(-len(rows) // alignment) * alignment)
    assert found.counts.tolist() == [len(rows) for rows in experts]
    assert found.bounds.tolist() == bounds
    assert found.source_bounds.tolist() == source_bounds
    padded = [
        rows + [-1] * (end - begin - len(rows))
        for rows, begin, end in zip(experts, bounds, bounds[1:], strict=False)
    ]
    assert found.row_offsets[: bounds[-1]].tolist() == [at for rows in padded for at in rows]
    due = [bounds[expert] + index for source in places for expert, index in source]
    assert found.places[: source_bounds[-1]].tolist() == due


def test_the_example_of_the_docstring(interpreted) -> None:
    _, known = layer({0: [0, 1]}, 2)
    messages = from_sources([torch.tensor([[0, 1], [0, -1]]), torch.tensor([[0]])], known, 0)
    for operation in OPERATIONS:
        found, _, offsets = arranged_by(operation, [*messages, None], 2, alignment=2)
        assert found.bounds.tolist() == [0, 4, 6]
        assert found.counts.tolist() == [3, 1]
        assert found.source_bounds.tolist() == [0, 3, 4, 4]
        assert found.places[:4].tolist() == [0, 1, 4, 2]
        assert found.faults.tolist() == [0, 0, 0, 0]
        begin = int(offsets[0]) + 128
        after = int(offsets[1]) + 128
        assert found.row_offsets[:6].tolist() == [begin, begin + 12, after, -1, begin, -1]


@pytest.mark.parametrize("alignment", [1, 8, 100, 128])
@pytest.mark.parametrize(
    ("num_sources", "num_tokens", "topk", "num_experts"),
    [(1, 1, 1, 1), (3, 5, 3, 7), (5, 4, 8, 103), (2, 0, 2, 8), (40, 2, 2, 9)],
)
def test_rows_are_grouped_by_expert_then_by_source(
    interpreted, seed, num_sources, num_tokens, topk, num_experts, alignment
) -> None:
    member = min(1, num_sources - 1)
    _, known = layer(spread(num_experts, num_sources), num_experts)
    held = known.slot_bounds[member + 1] - known.slot_bounds[member]
    all_ids = [torch.randint(-1, num_experts, (num_tokens, topk)) for _ in range(num_sources)]
    present = torch.rand(num_sources) < 0.8
    messages = from_sources(all_ids, known, member, present)
    capacity = num_sources * num_tokens * topk + held * alignment
    for operation in OPERATIONS:
        found, _, offsets = arranged_by(
            operation, messages, held, alignment=alignment, capacity=capacity
        )
        assert not found.faults.any()
        expect(found, messages, offsets, held, alignment)


def test_all_rows_to_one_expert_over_several_blocks(interpreted) -> None:
    _, known = layer({0: [0, 1, 2]}, 3)
    messages = from_sources([torch.full((300, 1), 1), torch.full((257, 1), 1)], known, 0)
    for operation in OPERATIONS:
        found, _, offsets = arranged_by(operation, messages, 3, alignment=64, capacity=640)
        expect(found, messages, offsets, 3, 64)


def damaged(message: bytes, word: int, value: int) -> bytes:
    return message[: 4 * word] + value.to_bytes(4, "little", signed=True) + message[4 * word + 4 :]


@pytest.mark.parametrize(
    ("word", "value", "fault"),
    [
        (0, 7, Fault.HEADER),  # no message at all
        (2, 99, Fault.HEADER),  # another epoch
        (8, 5, Fault.HEADER),  # another source
        (9, 3, Fault.SIZES),
        (10, -1, Fault.SIZES),
        (10, 2**30, Fault.SIZES),
        (11, 2**31 - 1, Fault.SIZES),
        (11, -5, Fault.SIZES),
        (10, 2, Fault.CONTENT),
        (11, 1, Fault.CONTENT),  # a choice of row 1
        (16, 3, Fault.CONTENT),
        (16, -1, Fault.CONTENT),
        (18, 2, Fault.CONTENT),
        (18, -1, Fault.CONTENT),
    ],
)
def test_a_wrong_message_counts_as_none(interpreted, word, value, fault) -> None:
    _, known = layer({0: [0, 1]}, 2)
    ids = torch.tensor([[0, 1], [0, -1]])
    messages = from_sources([ids, ids, ids], known, 0)
    messages[1] = damaged(messages[1], word, value)
    for operation in OPERATIONS:
        found, _, offsets = arranged_by(operation, messages, 2)
        assert found.faults.tolist() == [0, fault, 0, 0]
        expect(found, [messages[0], None, messages[2]], offsets, 2, 1)


def test_too_little_room_is_told(interpreted) -> None:
    _, known = layer({0: [0, 1]}, 2)
    messages = from_sources([torch.zeros(5, 1, dtype=torch.int64)] * 2, known, 0)
    for operation in OPERATIONS:
        for capacity, too_small in ((10, 0), (9, 1), (1, 1)):
            found, _, _ = arranged_by(operation, messages, 2, capacity=capacity)
            assert found.faults.tolist() == [0, 0, too_small]


def test_wrong_input_is_named() -> None:
    for changes, name in (
        ({"num_experts": 0}, "num_experts"),
        ({"capacity": 0}, "capacity"),
        ({"alignment": 0}, "alignment"),
        ({"ranks": torch.zeros(2)}, "dtype of ranks"),
        ({"ranks": torch.zeros(3, dtype=torch.int32)}, "shape of ranks"),
    ):
        with pytest.raises(InputInvalid) as caught:
            arranged_by(arrange, [None, None], changes.pop("num_experts", 2), **changes)
        assert caught.value.name == name
