"""Sizes: of a message, of a receive window, and what all members must agree on.

    T tokens of a rank   K choices of a token   H hidden   E_r experts of the receiving rank
    N choices for one receiver                  U tokens with at least one of them, U <= N

    dispatch   | header 64 | counts 4*E_r | choices 4*N | pad | rows U*H*itemsize |
    combine    | header 64 | rows N*H*itemsize |

Options change the parts: `combine: reduced` adds weights 4*N behind the choices and sends U rows
back, `dispatch_wire: fp8` sends U*H bytes and, padded, U*ceil(H/128)*4 bytes of scales.

Each part begins at a multiple of 64 bytes, apart from `choices`, which follows `counts` directly.
A window holds the largest message that `max_tokens` allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from configs.dispatch_options import CombineMode, CombineWire, DispatchWire
from dispatch.errors import InputInvalid

ALIGN_BYTES = 64
HEADER_BYTES = 64
INDEX_BYTES = 4  # counts and choices are int32
SCALE_GROUP, SCALE_BYTES = 128, 4  # elements of a row that share an fp32 scale in fp8
MICROBATCHES_MAX = 4  # an immediate has three bits for the window

DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # codes on the wire


def aligned(nbytes: int) -> int:
    """Round up to the next multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def rows_offset(num_experts: int, num_choices: int) -> int:
    """Return where the rows of a dispatch message begin, if it carries no weights."""
    return HEADER_BYTES + aligned(INDEX_BYTES * (num_experts + num_choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLayout:
    """What is exchanged, the same on every member.

    Attributes:
        hidden: H, elements of a row.
        topk: K, choices of a token.
        num_logical: E, experts of a layer.
        num_layers: Layers with experts.
        dtype: Type of the rows on their way to the experts, and of the result.
        max_tokens: Most tokens of one rank in one pass; sizes the windows.
        combine_dtype: Widest type that experts may return; sizes the windows of the way back.
        microbatches: Exchanges that may be in flight at once; each has windows of its own.
        combine: Where a token's results are added up: see `dispatch.partial_sums`.
        dispatch_wire: What rows are on their way to the experts: see `dispatch.row_wire`.
        combine_wire: What results are on their way back.

    Raises:
        InputInvalid: From the constructor.
    """

    hidden: int
    topk: int
    num_logical: int
    num_layers: int
    dtype: torch.dtype
    max_tokens: int
    combine_dtype: torch.dtype = torch.float32
    microbatches: int = 1
    combine: CombineMode = CombineMode.EXACT
    dispatch_wire: DispatchWire = DispatchWire.NATIVE
    combine_wire: CombineWire = CombineWire.NATIVE

    def __post_init__(self) -> None:
        for name in ("hidden", "topk", "num_logical", "num_layers", "max_tokens", "microbatches"):
            value = getattr(self, name)
            if value < 1:
                raise InputInvalid(name=name, observed=str(value), expected=">= 1")
        if self.microbatches > MICROBATCHES_MAX:
            raise InputInvalid(
                name="microbatches",
                observed=str(self.microbatches),
                expected=f"<= {MICROBATCHES_MAX}",
            )
        for name in ("dtype", "combine_dtype"):
            value = getattr(self, name)
            if value not in DTYPES:
                expected = " or ".join(map(str, DTYPES))
                raise InputInvalid(name=name, observed=str(value), expected=expected)

    @property
    def reduced(self) -> bool:
        """Whether the experts' ranks add up."""
        return self.combine is CombineMode.REDUCED

    @property
    def fp8(self) -> bool:
        """Whether rows travel to the experts in fp8."""
        return self.dispatch_wire is DispatchWire.FP8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the layout's type."""
        return self.hidden * self.dtype.itemsize

    @property
    def column_bytes(self) -> tuple[int, ...]:
        """Bytes of a row on its way to an expert, part by part."""
        if self.fp8:
            return self.hidden, SCALE_BYTES * -(-self.hidden // SCALE_GROUP)
        return (self.row_bytes,)

    @property
    def choices_max(self) -> int:
        """Most choices of one rank in one pass."""
        return self.max_tokens * self.topk

    def returned_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which results of `dtype` travel back."""
        return torch.bfloat16 if self.combine_wire is CombineWire.BF16 else dtype

    def rows_offset(self, num_experts: int, num_choices: int) -> int:
        """Return where the rows of a dispatch message begin."""
        return rows_offset(num_experts, num_choices * (2 if self.reduced else 1))

    def dispatch_bytes(self, num_experts: int, num_choices: int, num_rows: int) -> int:
        """Return the size of a dispatch message.

        Args:
            num_experts: E_r, experts of the receiving rank in the layer.
            num_choices: N, (token, choice) pairs that go to it.
            num_rows: U, tokens among them.
        """
        nbytes = self.rows_offset(num_experts, num_choices)
        for column in self.column_bytes:
            nbytes = aligned(nbytes) + num_rows * column
        return nbytes

    def combine_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        """Return the size of a combine message.

        Args:
            num_rows: N, or U where the experts' ranks add up.
            dtype: Of what the experts returned.
        """
        return HEADER_BYTES + num_rows * self.hidden * self.returned_dtype(dtype).itemsize

    def dispatch_window_bytes(self, num_experts: int, num_choices: int | None = None) -> int:
        """Return the size of a window for dispatch messages to a rank with `num_experts`.

        Args:
            num_experts: Most experts of the rank in a layer.
            num_choices: Most choices in a message; default: all that a rank may have.
        """
        choices = self.choices_max if num_choices is None else num_choices
        rows = min(choices, self.max_tokens)
        return aligned(self.dispatch_bytes(num_experts, choices, rows))

    def combine_window_bytes(self, num_choices: int | None = None) -> int:
        """Return the size of a window for combine messages; as `dispatch_window_bytes`."""
        choices = self.choices_max if num_choices is None else num_choices
        widest = max(self.combine_dtype, self.dtype, key=lambda dtype: dtype.itemsize)
        rows = min(choices, self.max_tokens) if self.reduced else choices
        return aligned(self.combine_bytes(rows, widest))


Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.generic]  # [n, words of a row]


class RowFormat:
    """Rows as integers: numpy has no bfloat16, and moving must not touch a single bit.

    A row is a run of the widest unsigned integers that divide it. Immutable.

    Attributes:
        row_bytes: Bytes of a row.
        word: The integer type.
        width: Words of a row.
    """

    __slots__ = ("row_bytes", "width", "word")

    def __init__(self, row_bytes: int) -> None:
        size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
        self.row_bytes = row_bytes
        self.word = np.dtype(f"u{size}")
        self.width = row_bytes // size

    def view(self, buffer: Bytes, offset: int, num_rows: int) -> Rows:
        """Return `num_rows` rows of `buffer` from byte `offset` on, sharing its memory."""
        return np.ndarray((num_rows, self.width), self.word, buffer, offset)

    def of(self, tensor: torch.Tensor) -> Rows:
        """Return the rows of a contiguous [n, H] CPU tensor, sharing its memory."""
        source = tensor.detach() if tensor.requires_grad else tensor
        return source.view(torch.uint8).numpy().view(self.word)


COPY_ROWS = 256  # a temporary of this many rows is memory that was used just before


def copy_rows(
    source: Rows,
    source_rows: npt.NDArray[np.integer],
    target: Rows,
    target_rows: npt.NDArray[np.integer],
) -> None:
    """Set `target[target_rows[i]] = source[source_rows[i]]` for all i."""
    for begin in range(0, len(source_rows), COPY_ROWS):
        part = slice(begin, begin + COPY_ROWS)
        target[target_rows[part]] = source[source_rows[part]]
