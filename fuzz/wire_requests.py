"""A request header, its table of pieces, and what the bookkeeping of slices makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer.errors import ProtocolViolation
from transfer.pieces import out_of_bounds
from transfer.wire import (
    PAYLOAD_BYTES_MAX,
    REQUEST,
    SLICE_PIECES,
    Request,
    RequestKind,
    encode_pieces,
    parse_pieces,
    parse_request,
)

_WINDOW_BYTES = 1 << 16


def seeds() -> list[bytes]:
    """One request of each kind."""
    table = encode_pieces(np.array([0, 64]), np.array([8, 16]))
    values: dict[str, Any] = {
        "transfer_id": 1, "oldest": 1, "slice_idx": 0, "num_slices": 2, "num_pieces": 2,
        "nbytes": 24, "immediate": 7, "token": b"t" * 16,
    }  # fmt: skip
    return [Request(kind=kind, **values).encode() + table for kind in RequestKind]


def run(data: bytes) -> None:
    """One input."""
    if len(data) < REQUEST.size:
        return
    try:
        request = parse_request(data[: REQUEST.size])
        assert request.nbytes <= PAYLOAD_BYTES_MAX
        assert request.num_pieces <= SLICE_PIECES
        table = data[REQUEST.size : REQUEST.size + 16 * request.num_pieces]
        if len(table) < 16 * request.num_pieces:
            return
        offsets, lengths = parse_pieces(table, request.nbytes)
    except ProtocolViolation:
        return
    problem = out_of_bounds(offsets, lengths, _WINDOW_BYTES)
    inside = all(
        o >= 0 and o + n <= _WINDOW_BYTES
        for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True)
    )
    assert (problem is None) == inside
