"""A process that writes numbered records to a slab and says after each that it has ended.

Started as `python -m tests.support.slab_writer PATH SLAB_BYTES SEED`; ends when it is killed.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from configs.schema import FileConfig
from transfer.backends.file import FileSlab

RECORD_MAX = 30_000


def records(seed: int, slab_bytes: int) -> list[tuple[int, int]]:
    """Disjoint (offset, length) in random order; most share blocks with their neighbours."""
    rng = np.random.default_rng(seed)
    marks = np.cumsum(rng.integers(1, RECORD_MAX, size=2 * slab_bytes // RECORD_MAX))
    marks = marks[marks < slab_bytes]
    order = rng.permutation(len(marks) - 1)
    return [(int(marks[i]), int(marks[i + 1] - marks[i])) for i in order]


def content(seed: int, record: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, record]).integers(0, 256, size=length, dtype=np.uint8)


def main() -> None:
    path, slab_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with FileSlab(path, slab_bytes, FileConfig(threads=3, io_bytes=1 << 16)) as slab:
        for i, (offset, length) in enumerate(records(seed, slab_bytes)):
            slab.write(torch.from_numpy(content(seed, i, length)), 0, offset, length)
            sys.stdout.write(f"{i}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
