"""15: rows beyond 2^31 elements and 4 GiB; the memory is mapped and hardly touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dispatch import DispatchLayout, LocalDispatcher
from dispatch.layout import RowFormat, copy_rows

HIDDEN = 7168
FAR = (1 << 32) // HIDDEN + 5  # a row whose first element is beyond 2^32 elements, 8 GiB


@pytest.fixture
def sparse():
    """9 GiB of zeros, in pages that exist when they are touched."""
    return np.zeros(9 << 30, np.uint8)


def test_case_15_rows_beyond_four_gib_are_found(sparse):
    rows = RowFormat(2 * HIDDEN).view(sparse, 0, FAR + 2)
    source = np.arange(2 * rows.shape[1], dtype=rows.dtype).reshape(2, -1)
    copy_rows(source, np.array([1, 0]), rows, np.array([FAR, FAR + 1]))
    assert np.array_equal(rows[FAR], source[1])
    assert np.array_equal(rows[FAR + 1], source[0])
    assert not rows[FAR - (1 << 31) * 2 // HIDDEN].any()


def test_case_15_a_token_beyond_four_gib_reaches_its_expert(sparse):
    num_tokens = FAR + 2
    words = sparse[: num_tokens * HIDDEN * 2].view(np.int16)
    x = torch.from_numpy(words).view(torch.bfloat16).view(num_tokens, HIDDEN)
    x[FAR] = 3.0
    layout = DispatchLayout(
        hidden=HIDDEN,
        topk=1,
        num_logical=2,
        num_layers=1,
        dtype=torch.bfloat16,
        max_tokens=num_tokens,
        combine_dtype=torch.bfloat16,
    )
    ids = torch.full((num_tokens, 1), -1)
    ids[FAR] = 1
    dispatcher = LocalDispatcher(layout=layout)
    dispatcher.begin_pass()
    arrived, _ = dispatcher.dispatch(x, ids, torch.ones(num_tokens, 1), layer=0)
    assert arrived.counts == (0, 1)
    assert bool((arrived.rows == 3.0).all())


def test_case_15_sizes_are_exact_integers():
    layout = DispatchLayout(
        hidden=HIDDEN,
        topk=32,
        num_logical=256,
        num_layers=1,
        dtype=torch.bfloat16,
        max_tokens=1 << 20,
    )
    assert layout.combine_window_bytes() == 64 + (32 << 20) * HIDDEN * 4
    want = 64 + 4 * (256 + (32 << 20)) + (1 << 20) * HIDDEN * 2
    assert layout.dispatch_window_bytes(256) == -(-want // 64) * 64
