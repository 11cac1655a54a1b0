"""xxh3_64 over a block's bytes: computed by the writer, verified by every reader after its copy."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray


def block_checksums(
    memory: NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[int]:
    """Return one unsigned 64-bit checksum per piece `memory[offset : offset + length]`."""
    view = memory.data
    return [
        xxhash.xxh3_64_intdigest(view[offset : offset + length])
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
    ]
