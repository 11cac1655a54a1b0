"""Types of the compiled part, `native.c`."""

import numpy as np
import numpy.typing as npt

def weighted_sums(
    out: int,
    rows: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
    width: int,
    hidden: int,
    in_code: int,
    out_code: int,
    /,
) -> None: ...
def gather_rows(target: int, rows: npt.NDArray[np.int64], row_bytes: int, /) -> None: ...
def take_rows(
    target: int, source: int, index: npt.NDArray[np.int64], row_bytes: int, /
) -> None: ...
