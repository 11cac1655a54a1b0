"""Pack results: what the experts returned, into one combine message per source, in one launch.

Legend: W sources, R rows of room, N rows that arrived, H hidden.

    results          r0 r1 r2 -- r4 --        rows as they were unpacked, padding between
    places           0 1 4 2                  row of each arrival (the example of `arrange`)
    source_bounds    0 3 4

    to source 0   | header | r0 r1 r4 |
    to source 1   | header | r2       |

Rows go back in the order in which the source listed its choices, one for each. They are moved as
words of up to 8 bytes, not a bit changes. The messages are those of the CPU path, byte for byte.
Where more rows arrived than there was room for, all messages are empty, and the sources notice.
"""

from __future__ import annotations

import torch

from dispatch.kernels.arranged import Arranged
from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.message_parts import EXPERTS_WORD, check_buffer
from dispatch.kernels.operands import FLOATS, check_operand, check_range, runs_kernel
from dispatch.kernels.pack import BLOCK, row_programs, word_type
from dispatch.kernels.unpack import used_rows
from dispatch.layout import HEADER_BYTES


@jit
def _pack_results_kernel(
    results_ptr: tl.tensor,
    words_ptr: tl.tensor,
    messages_ptr: tl.tensor,
    num_bytes_ptr: tl.tensor,
    header_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    places_ptr: tl.tensor,
    source_bounds_ptr: tl.tensor,
    overflow_ptr: tl.tensor,
    num_programs: tl.tensor,
    num_sources: tl.tensor,
    row_words: tl.tensor,
    WORD_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    part = tl.program_id(1)
    if program < num_programs:
        lane = tl.arange(0, BLOCK_W)
        ends = tl.load(source_bounds_ptr + 1 + lane, mask=lane < num_sources, other=2147483647)
        column = part * BLOCK + tl.arange(0, BLOCK)
        inside = column < row_words
        arrived = used_rows(source_bounds_ptr + num_sources, overflow_ptr)
        for arrival in range(program, arrived, num_programs):
            source = tl.sum((ends <= arrival).to(tl.int32), 0)
            offset = tl.load(offsets_ptr + source)
            place = tl.load(places_ptr + arrival).to(tl.int64)
            begin = place * row_words
            if UNIT == 2:
                begin = tl.multiple_of(begin, 2)
            row = tl.load(results_ptr + begin + column, mask=inside & (offset >= 0))
            index = tl.zeros((), tl.int64) + arrival - tl.load(source_bounds_ptr + source)
            target = ((offset + 64) // WORD_BYTES + index * row_words) // UNIT * UNIT
            tl.store(messages_ptr + target + column, row, mask=inside & (offset >= 0))
    elif part == 0:
        source = program - num_programs
        rows = tl.load(source_bounds_ptr + source + 1) - tl.load(source_bounds_ptr + source)
        rows = tl.where(tl.load(overflow_ptr) != 0, 0, rows)
        offset = tl.load(offsets_ptr + source)
        size = 64 + rows.to(tl.int64) * row_words * WORD_BYTES
        tl.store(num_bytes_ptr + source, tl.where(offset >= 0, size, 0))
        word = tl.arange(0, 16)
        value = tl.load(header_ptr + word)
        value = tl.where(word == 9, 0, value)
        value = tl.where((word == 10) | (word == 11), rows, value)
        at = tl.maximum(offset, 0) // 4 + word
        tl.store(words_ptr + at, value, mask=(word < 16) & (offset >= 0))


def pack_results(
    results: torch.Tensor,
    arranged: Arranged,
    *,
    header: torch.Tensor,
    messages: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Write this rank's combine messages. Waits for nothing.

    Args:
        results: [R, H] bf16, fp16 or fp32, contiguous: row i belongs to row i of `unpack`.
        arranged: Of the dispatch.
        header: [64] uint8: of `dispatch.message`, with any numbers of experts, choices and rows.
        messages: [bytes] uint8, aligned to 64 bytes; written to. Room at each offset is the
            caller's promise.
        offsets: [W] int64: where each source's message begins, a multiple of 64; -1 writes none.

    Returns:
        [W] int64: bytes of each message, 0 where none was written.

    Raises:
        InputInvalid: A shape, type, device or alignment is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    capacity, num_sources = len(arranged.places), len(arranged.source_bounds) - 1
    device = results.device
    check_operand("results", results, (capacity, None), FLOATS)
    hidden = results.shape[1]
    check_range("hidden", hidden, 1, 2**31 - 1)
    check_operand("places", arranged.places, (None,), (torch.int32,), device=device)
    check_operand("header", header, (HEADER_BYTES,), (torch.uint8,), device=device)
    check_operand("offsets", offsets, (num_sources,), (torch.int64,), device=device)
    check_buffer(messages, device)
    if not runs_kernel(device):
        return pack_results_torch(
            results, arranged, header=header, messages=messages, offsets=offsets
        )
    row_bytes = hidden * results.itemsize
    word = word_type(row_bytes, results.data_ptr())
    row_words = row_bytes // word.itemsize
    num_bytes = torch.empty_like(offsets)
    parts = cdiv(row_words, BLOCK)
    num_programs = min(capacity, row_programs(parts))
    launch(
        _pack_results_kernel,
        (num_programs + num_sources, parts),
        results.detach().view(torch.uint8).view(word),
        messages.view(torch.int32),
        messages.view(word),
        num_bytes,
        header.view(torch.int32),
        offsets,
        arranged.places,
        arranged.source_bounds,
        arranged.faults[-1:],
        num_programs,
        num_sources,
        row_words,
        device=device,
        WORD_BYTES=word.itemsize,
        UNIT=2 if row_bytes % 16 == 0 and results.data_ptr() % 16 == 0 else 1,
        BLOCK=BLOCK,
        BLOCK_W=power_of_two(num_sources),
    )
    return num_bytes


def pack_results_torch(
    results: torch.Tensor,
    arranged: Arranged,
    *,
    header: torch.Tensor,
    messages: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """See `pack_results`."""
    row_bytes = results.shape[1] * results.itemsize
    rows = results.detach().view(torch.uint8)
    num_bytes = torch.zeros_like(offsets)
    bounds = arranged.source_bounds.tolist()
    if arranged.faults[-1]:
        bounds = [0] * len(bounds)
    for source, offset in enumerate(offsets.tolist()):
        if offset < 0:
            continue
        places = arranged.places[bounds[source] : bounds[source + 1]].long()
        head = header.view(torch.int32).clone()
        sizes = [0, len(places), len(places)]
        head[EXPERTS_WORD : EXPERTS_WORD + 3] = torch.tensor(sizes, dtype=torch.int32)
        message = messages[offset : offset + HEADER_BYTES + len(places) * row_bytes]
        message[:HEADER_BYTES] = head.view(torch.uint8)
        message[HEADER_BYTES:].view(len(places), row_bytes).copy_(rows[places])
        num_bytes[source] = len(message)
    return num_bytes
