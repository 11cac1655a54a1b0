"""Headers, sizes and rows as words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dispatch import DispatchLayout, InputInvalid, MessageMismatch
from dispatch.layout import HEADER_BYTES, RowFormat
from dispatch.message import Phase, Stamp, read_header, write_header

STAMP = Stamp(1 << 40, 7, 3, 0)
BF16, HIDDEN, SOURCE, NUM_EXPERTS = torch.bfloat16, 64, 5, 4


def message() -> np.ndarray:
    buffer = np.zeros(HEADER_BYTES, np.uint8)
    write_header(buffer, STAMP.header(BF16, HIDDEN), SOURCE, NUM_EXPERTS, 9, 6)
    return buffer


def test_header_round_trips():
    found = read_header(message(), STAMP.header(BF16, HIDDEN), SOURCE, NUM_EXPERTS)
    assert found == (9, 6)
    assert (STAMP.phase, STAMP._replace(parity=1).phase) == (Phase.DISPATCH, Phase.COMBINE)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("epoch", {"epoch": (1 << 40) + 1}),
        ("pass", {"pass_id": 8}),
        ("layer", {"layer": 2}),
        ("phase", {"parity": 1}),
        ("dtype", {"dtype": torch.float32}),
        ("hidden", {"hidden": 65}),
        ("source and receiver experts", {"source": 4}),
        ("source and receiver experts", {"num_experts": 5}),
    ],
)
def test_every_field_is_checked(name, change):
    due = {"dtype": BF16, "hidden": HIDDEN, "source": SOURCE, "num_experts": NUM_EXPERTS, **change}
    stamp = STAMP._replace(**{f: value for f, value in change.items() if f in Stamp._fields})
    with pytest.raises(MessageMismatch) as caught:
        read_header(
            message(), stamp.header(due["dtype"], due["hidden"]), due["source"], due["num_experts"]
        )
    assert caught.value.name == name


def test_garbage_has_no_magic():
    with pytest.raises(MessageMismatch, match="magic"):
        read_header(
            np.zeros(HEADER_BYTES, np.uint8), STAMP.header(BF16, HIDDEN), SOURCE, NUM_EXPERTS
        )


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 12, 144, 1024, 1026])
def test_rows_as_words_share_memory(row_bytes):
    rows = RowFormat(row_bytes)
    tensor = torch.arange(3 * row_bytes, dtype=torch.uint8).view(3, row_bytes)
    words = rows.of(tensor)
    assert words.shape == (3, rows.width)
    assert rows.word.itemsize * rows.width == row_bytes
    words[1] = 0
    assert not tensor[1].any()
    assert rows.of(tensor[:0]).shape == (0, rows.width)


def test_windows_hold_the_largest_messages():
    layout = DispatchLayout(
        hidden=33, topk=3, num_logical=5, num_layers=1, dtype=torch.bfloat16, max_tokens=7
    )
    assert layout.dispatch_window_bytes(5) >= layout.dispatch_bytes(5, 21, 7)
    assert layout.combine_window_bytes() >= layout.combine_bytes(21, torch.float32)
    assert layout.combine_bytes(21, torch.bfloat16) == 64 + 21 * 66
    # header 64 | 4 * (5 + 21) = 104, padded to 128 | 7 rows of 66 bytes
    assert layout.dispatch_bytes(5, 21, 7) == 64 + 128 + 7 * 66
    assert layout.dispatch_bytes(0, 0, 0) == 64


@pytest.mark.parametrize("change", [{"hidden": 0}, {"topk": 0}, {"dtype": torch.int8}])
def test_impossible_layouts_are_refused(change):
    fine = {"hidden": 8, "topk": 1, "num_logical": 1, "num_layers": 1, "max_tokens": 1}
    with pytest.raises(InputInvalid):
        DispatchLayout(**{**fine, "dtype": torch.float32, **change})
