"""The normal shapes of DeepEP: one row for each (token, rank), in the order of the source ranks.

    recv_x            [n, H]            rows of the tokens that chose an expert here
    recv_topk_idx     [n, K] int64      their choices as local experts, -1 for those elsewhere
    recv_topk_weights [n, K] fp32       0 for those elsewhere

In `dispatch` terms each rank is one expert, a token's choices are the ranks it goes to, and all
weights are 1, so that the combine is the plain sum of one row per rank, in fp32, ranks ascending.
Choices and weights travel in the row, behind the payload:

    | payload: H bf16, or H fp8 and H / 128 scales | K int32 | K fp32 | up to the width |
"""

from __future__ import annotations

import torch

from dispatch.deepep.fp8_rows import GROUP
from dispatch.dispatcher import Dispatcher
from dispatch.errors import CallOrder, InputInvalid
from dispatch.handle import DispatchHandle
from dispatch.layout import DispatchLayout
from dispatch.validation import check_tensor

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
WORDS = 4  # a row is a multiple of this many bf16


class NormalHandle:
    """Which token goes to which rank; good for further dispatches of the same routing.

    Attributes:
        is_token_in_rank: [T, R] bool.
        hidden: H.
        topk: K.
        num_received: n, rows that arrive here.
        num_rows: Rows of `recv_x`: n, or the worst case if it was asked for.
    """

    def __init__(self, is_token_in_rank: torch.Tensor, hidden: int, topk: int) -> None:
        self.is_token_in_rank = is_token_in_rank
        self.hidden = hidden
        self.topk = topk
        self.num_received = 0
        self.num_rows = 0
        self._open: tuple[Dispatcher, DispatchHandle] | None = None

    def opened(self, dispatcher: Dispatcher, handle: DispatchHandle) -> None:
        """A dispatch is complete; its combine comes next."""
        self._open = dispatcher, handle

    def take(self) -> tuple[Dispatcher, DispatchHandle]:
        """Return what the combine needs.

        Raises:
            CallOrder: Every dispatch has had its combine.
        """
        if self._open is None:
            raise CallOrder(call="combine", state="waiting for a dispatch with this handle")
        found, self._open = self._open, None
        return found


def width_of(hidden: int, topk: int) -> int:
    """Return the bf16 words of a row: enough for bf16 both ways, and for the choices.

    Rows in fp8 with their scales are narrower; what they leave is not used.
    """
    return -(-(hidden + 4 * topk) // WORDS) * WORDS


def rank_layout(size: int, rows: torch.Tensor, max_tokens: int) -> DispatchLayout:
    """Return the sizes of an exchange of such rows between `size` ranks.

    Raises:
        InputInvalid: They are not possible.
    """
    return DispatchLayout(
        hidden=rows.shape[1],
        topk=size,
        num_logical=size,
        num_layers=1,
        dtype=rows.dtype,
        max_tokens=max_tokens,
        combine_dtype=rows.dtype,
        microbatches=2,
    )


def rank_choices(is_token_in_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and weights for a dispatch in which every rank is an expert."""
    ranks = torch.arange(is_token_in_rank.shape[1])
    ids = torch.where(is_token_in_rank, ranks, -1)
    return ids.contiguous(), torch.ones(ids.shape, dtype=torch.float32)


def payload_shape(x: Payload) -> tuple[int, int, bool]:
    """Return T, H and whether the rows are fp8 with scales.

    Raises:
        InputInvalid: Neither [T, H] bf16, nor [T, H] fp8 with [T, H / 128] fp32 scales.
    """
    if isinstance(x, torch.Tensor):
        if x.ndim != 2:
            raise InputInvalid(name="shape of x", observed=str(list(x.shape)), expected="[T, H]")
        check_tensor("x", x, tuple(x.shape), torch.bfloat16)
        return x.shape[0], x.shape[1], False
    rows, scales = x
    if rows.ndim != 2 or rows.shape[1] % GROUP:
        raise InputInvalid(
            name="shape of x", observed=str(list(rows.shape)), expected="[T, H], H % 128 = 0"
        )
    num_tokens, hidden = rows.shape
    check_tensor("x", rows, (num_tokens, hidden), torch.float8_e4m3fn)
    check_tensor("scales", scales, (num_tokens, hidden // GROUP), torch.float32)
    return num_tokens, hidden, True


def written(
    x: Payload, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, width: int
) -> torch.Tensor:
    """Return the rows that travel: [T, width] bf16, its bits are what is drawn in the module."""
    parts = list(x) if isinstance(x, tuple) else [x]
    if topk_idx is not None and topk_weights is not None:
        parts += [topk_idx.int(), topk_weights]
    words = torch.cat([_bytes(part) for part in parts], 1)
    room = torch.zeros(len(words), 2 * width - words.shape[1], dtype=torch.uint8)
    return torch.cat([words, room], 1).view(torch.bfloat16)


def read(
    rows: torch.Tensor, hidden: int, topk: int, *, fp8: bool
) -> tuple[Payload, torch.Tensor, torch.Tensor]:
    """Take rows apart again: payload, choices as they were sent, weights."""
    kinds: list[tuple[torch.dtype, int]] = [(torch.bfloat16, hidden)]
    if fp8:
        kinds = [(torch.float8_e4m3fn, hidden), (torch.float32, hidden // GROUP)]
    parts: list[torch.Tensor] = []
    begin, words = 0, rows.view(torch.uint8)
    for kind, count in (*kinds, (torch.int32, topk), (torch.float32, topk)):
        end = begin + count * kind.itemsize
        part = words[:, begin:end].contiguous()
        parts.append(part.view(kind) if count else torch.empty(len(rows), 0, dtype=kind))
        begin = end
    *payload, ids, weights = parts
    return (payload[0] if len(payload) == 1 else (payload[0], payload[1])), ids, weights


def local_choices(
    ids: torch.Tensor, weights: torch.Tensor, experts: range
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return choices by local number, their weights, and how many each local expert has."""
    here = (ids >= experts.start) & (ids < experts.stop)
    local = torch.where(here, ids - experts.start, -1).long()
    counts = torch.bincount(local[here], minlength=len(experts)).tolist()
    return local, torch.where(here, weights, 0.0), counts


def lengthened(tensor: torch.Tensor, num_rows: int, fill: int = 0) -> torch.Tensor:
    """Return the tensor with `num_rows` rows, those that were added filled."""
    if len(tensor) == num_rows:
        return tensor
    room = torch.full((num_rows - len(tensor), *tensor.shape[1:]), fill, dtype=torch.float32)
    return torch.cat([tensor, room.to(tensor.dtype)])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
