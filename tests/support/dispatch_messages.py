"""Dispatch messages made and read the slow way, with nothing but the drawing of the format."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from dispatch.expert_map import ExpertMap
from dispatch.kernels.routed import ExpertSlots
from dispatch.message import Stamp, write_header
from dispatch.routing import LayerRoute

CPU = torch.device("cpu")
STAMP = Stamp(epoch=3, pass_id=7, layer=0, parity=0)
SOURCE = 5


def spread(num_experts: int, num_ranks: int) -> dict[int, range]:
    """Experts dealt out to ranks one by one."""
    return {rank: range(rank, num_experts, num_ranks) for rank in range(num_ranks)}


def layer(
    placement: Mapping[int, Iterable[int]], num_experts: int, source_rank: int = 0
) -> tuple[ExpertSlots, LayerRoute]:
    """A layer's tables, and the CPU path's route, which knows nothing of the kernels."""
    experts = ExpertMap(
        num_layers=1,
        num_logical=num_experts,
        placement={rank: (tuple(held),) for rank, held in placement.items()},
    )
    known = LayerRoute(experts, sorted(placement), source_rank, 0)
    return ExpertSlots.of(known, num_experts, CPU), known


def shared_header(hidden: int) -> bytes:
    return STAMP.header(torch.bfloat16, hidden)


def header_of(hidden: int) -> torch.Tensor:
    """The template that `pack` takes: numbers of experts, choices and rows still to be set."""
    buffer = np.zeros(64, np.uint8)
    write_header(buffer, shared_header(hidden), SOURCE, 0, 0, 0)
    return torch.from_numpy(buffer)


def pad(parts: bytes) -> bytes:
    return parts + bytes(-len(parts) % 64)


def messages_of(
    known: LayerRoute,
    ids: torch.Tensor,
    rows: list[bytes],
    hidden: int,
    scales: list[bytes] | None = None,
    source: int = SOURCE,
) -> list[bytes]:
    """What each member is to get; `rows` (and `scales`) are the bytes of each token."""
    slots = known.slots(ids.long().numpy())
    routing = known.route(slots, *ids.shape)
    found = []
    for member in range(len(known.slot_bounds) - 1):
        first, last = known.slot_bounds[member : member + 2]
        begin, end = routing.choice_bounds[member : member + 2]
        tokens = routing.row_tokens[slice(*routing.row_bounds[member : member + 2])].tolist()
        head = np.zeros(64, np.uint8)
        write_header(head, shared_header(hidden), source, last - first, end - begin, len(tokens))
        numbers = [*routing.counts[first:last].tolist(), *routing.choice_rows[begin:end].tolist()]
        message = pad(head.tobytes() + struct.pack(f"<{len(numbers)}i", *numbers))
        message += b"".join(rows[token] for token in tokens)
        if scales is not None:
            message = pad(message) + b"".join(scales[token] for token in tokens)
        found.append(message)
    return found


def windows(sizes: list[int], skipped: Iterable[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of noise with room for messages of these sizes, and where each begins."""
    offsets, end = [], 64
    for member, size in enumerate(sizes):
        offsets.append(-1 if member in skipped else end)
        end += -(-size // 64) * 64 + 64
    buffer = torch.randint(0, 256, (end + 64,), dtype=torch.uint8)
    aligned = buffer[-buffer.data_ptr() % 64 :][: end // 64 * 64]
    return aligned, torch.tensor(offsets)


def raw(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each row."""
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in tensor]


def arrived(messages: list[bytes | None]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Messages of all sources in windows of one size; also where each begins, and that size."""
    room = max(64, *(-(-len(message or b"") // 64) * 64 for message in messages))
    buffer, offsets = windows([room] * len(messages))
    for source, message in enumerate(messages):
        begin = int(offsets[source])
        if message is None:
            offsets[source] = -1
        else:
            whole = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            buffer[begin : begin + len(message)] = whole
    return buffer, offsets, room
