"""The way back: results into combine messages, and where each choice's result lies in them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.arranged import Arranged
from dispatch.kernels.locate_results import locate_results, locate_results_torch
from dispatch.kernels.pack_results import pack_results, pack_results_torch
from dispatch.kernels.route import route_torch
from dispatch.message import write_header
from tests.support.dispatch_messages import SOURCE, header_of, layer, raw, shared_header, windows

PACKERS = (pack_results, pack_results_torch)
LOCATORS = (locate_results, locate_results_torch)


def arranged_of(places, source_bounds, capacity):
    offsets = torch.zeros(len(source_bounds) - 1, dtype=torch.int64)
    arranged = Arranged.empty(offsets, 1, capacity)
    arranged.places[: len(places)] = torch.tensor(places, dtype=torch.int32)
    arranged.faults.zero_()
    arranged.source_bounds.copy_(torch.tensor(source_bounds))
    return arranged


def message(rows: list[bytes], hidden: int, source: int = SOURCE) -> bytes:
    head = np.zeros(64, np.uint8)
    write_header(head, shared_header(hidden), source, 0, len(rows), len(rows))
    return head.tobytes() + b"".join(rows)


def test_the_example_of_packing(interpreted) -> None:
    results = torch.arange(6.0).view(6, 1)
    for operation in PACKERS:
        messages = torch.zeros(256, dtype=torch.uint8)
        num_bytes = operation(
            results, arranged_of([0, 1, 4, 2], [0, 3, 4], 6), header=header_of(1),
            messages=messages, offsets=torch.tensor([0, 128]),
        )  # fmt: skip
        assert num_bytes.tolist() == [64 + 12, 64 + 4]
        assert messages.view(torch.float32)[16:19].tolist() == [0.0, 1.0, 4.0]
        assert messages.view(torch.float32)[48].item() == 2.0
        assert messages.view(torch.int32)[9:12].tolist() == [0, 3, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shares", "hidden"), [([3], 1), ([0, 5, 2], 7), ([4, 0, 0, 1, 9], 1026), ([0, 0], 16)]
)
def test_each_source_gets_its_rows_in_its_order(interpreted, seed, shares, hidden, dtype) -> None:
    capacity = sum(shares) + 7
    results = torch.randn(capacity, hidden).to(dtype)
    bounds = [0, *np.cumsum(shares).tolist()]
    places = torch.randperm(capacity)[: bounds[-1]].tolist()
    rows = raw(results[places])
    due = [message(rows[a:b], hidden) for a, b in pairwise(bounds)]
    for operation in PACKERS:
        for skipped in ((), (0,)):
            messages, offsets = windows([len(one) for one in due], skipped)
            expected = messages.clone()
            num_bytes = operation(
                results, arranged_of(places, bounds, capacity), header=header_of(hidden),
                messages=messages, offsets=offsets,
            )  # fmt: skip
            for source, one in enumerate(due):
                sent = source not in skipped
                assert int(num_bytes[source]) == (len(one) if sent else 0)
                if sent:
                    begin = int(offsets[source])
                    whole = torch.frombuffer(bytearray(one), dtype=torch.uint8)
                    expected[begin : begin + len(one)] = whole
            assert torch.equal(messages, expected)


def test_few_programs_share_many_rows(interpreted, seed, monkeypatch) -> None:
    monkeypatch.setattr("dispatch.kernels.pack.PROGRAMS", 3)
    test_each_source_gets_its_rows_in_its_order(None, seed, [4, 0, 9], 1026, torch.bfloat16)


def test_the_example_of_locating(interpreted) -> None:
    slots, _ = layer({0: [0, 1], 1: [2, 3]}, 4)
    routed = route_torch(torch.tensor([[0, 2], [2, 3], [-1, 0]]), slots)
    rows = [b"\0" * 64] * 3
    for operation in LOCATORS:
        whole = message(rows[:2], 16, 0).ljust(256, b"\0") + message(rows, 16, 1)
        messages = torch.frombuffer(bytearray(whole), dtype=torch.uint8).clone()
        found, faults = operation(
            messages, routed, header=header_of(16), ranks=torch.tensor([0, 1], dtype=torch.int32),
            window_rows=4, row_bytes=64,
        )  # fmt: skip
        assert found.tolist() == [[0, 4], [5, 6], [-1, 1]]
        assert faults.tolist() == [0, 0]


@pytest.mark.parametrize(("word", "value"), [(0, 1), (2, 8), (8, 9), (9, 1), (10, 4), (11, 2)])
def test_a_message_that_is_not_due_is_told(interpreted, word, value) -> None:
    slots, _ = layer({0: [0, 1], 1: [2, 3]}, 4)
    routed = route_torch(torch.tensor([[0, 2], [2, 3], [-1, 0]]), slots)
    whole = message([b"\0" * 64] * 2, 16, 0).ljust(256, b"\0") + message([b"\0" * 64] * 3, 16, 1)
    messages = torch.frombuffer(bytearray(whole), dtype=torch.uint8).clone()
    messages.view(torch.int32)[64 + word] = value
    for operation in LOCATORS:
        _, faults = operation(
            messages, routed, header=header_of(16), ranks=torch.tensor([0, 1], dtype=torch.int32),
            window_rows=4, row_bytes=64,
        )  # fmt: skip
        assert faults.tolist() == [0, 1]


def test_wrong_input_is_named() -> None:
    slots, _ = layer({0: [0], 1: [1]}, 2)
    routed = route_torch(torch.tensor([[0, 1]]), slots)
    messages = torch.zeros(512, dtype=torch.uint8)
    for changes, name in (
        ({"row_bytes": 0}, "row_bytes"),
        ({"row_bytes": 10}, "bytes between messages that are no multiple of 64"),
        ({"window_rows": 8}, "bytes of the last header"),
        ({"ranks": torch.zeros(3, dtype=torch.int32)}, "shape of ranks"),
    ):
        arguments = {
            "header": header_of(16),
            "ranks": torch.zeros(2, dtype=torch.int32),
            "window_rows": 2,
            "row_bytes": 64,
        }
        with pytest.raises(InputInvalid) as caught:
            locate_results(messages, routed, **{**arguments, **changes})
        assert caught.value.name == name
