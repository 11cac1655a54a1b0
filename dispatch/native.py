"""The compiled loops where they were built.

The only module that imports `dispatch._native`. MOE_RUNTIME_NATIVE=0 keeps it from being used;
who finds `compiled` to be None does the same in torch, with the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from transfer.compiled_part import compiled_part

compiled = compiled_part("dispatch._native")


def addresses(
    rows: npt.NDArray[Any], index: npt.NDArray[np.integer], row_bytes: int
) -> npt.NDArray[np.int64]:
    """Return where the rows `rows[index]` of a contiguous array lie in memory."""
    found: npt.NDArray[np.int64] = np.multiply(index, row_bytes, dtype=np.int64)
    found += rows.__array_interface__["data"][0]
    return found


def take_rows(
    source: npt.NDArray[Any], index: npt.NDArray[np.int64], target: npt.NDArray[Any]
) -> None:
    """Set `target[i] = source[index[i]]` for all i.

    Args:
        source: [m, words], contiguous.
        index: [n], each below m, contiguous.
        target: [n, words], contiguous, of the same type; may begin anywhere.
    """
    if compiled is None:
        source.take(index, 0, target, "clip")
        return
    compiled.take_rows(
        target.__array_interface__["data"][0],
        source.__array_interface__["data"][0],
        index,
        source.shape[1] * source.itemsize,
    )
