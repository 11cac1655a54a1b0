"""Pieces as work requests: which of them travel together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transfer.pieces import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """W work requests with E scatter-gather elements, in order, for one queue pair.

    Attributes:
        remote: [W] addresses at the other side.
        first: [W + 1] index of each one's first element; first[W] = E.
        local: [E] addresses here.
        lengths: [E] bytes.
    """

    remote: Ints
    first: Ints
    local: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.remote)


def plan(local: Ints, remote: Ints, lengths: Ints, elements_max: int) -> Requests:
    """Join pieces that follow one another at the remote side into one request each.

    Args:
        local: [N] addresses here.
        remote: [N] addresses there.
        lengths: [N] bytes, all positive, none longer than a message.
        elements_max: how many pieces a request may have.
    """
    count = len(lengths)
    index = np.arange(count + 1)
    follows = remote[1:] == remote[:-1] + lengths[:-1]
    if elements_max == 1 or not follows.any():
        return Requests(remote=remote, first=index, local=local, lengths=lengths)
    starts = np.concatenate(([True], ~follows))
    # Within a run, every `elements_max`-th piece begins a new request.
    run_start = np.maximum.accumulate(np.where(starts, index[:-1], 0))
    starts |= (index[:-1] - run_start) % elements_max == 0
    first = np.flatnonzero(starts)
    return Requests(
        remote=remote[first], first=np.append(first, count), local=local, lengths=lengths
    )
