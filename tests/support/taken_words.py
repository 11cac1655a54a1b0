"""What a master's table of taken keys says, word by word."""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import numpy as np

from kvstore import MasterServer
from kvstore.master.posts import HEAD_BYTES

WORDS = 8  # of a bucket, whose first counts the keys that have none


class Words(NamedTuple):
    """Counts.

    Attributes:
        keys: Taken, as the master's books have it.
        used: Taken, as the office has it.
        own: Words of the master, and keys that have none.
        claims: Words of clients.
        clients: Who may post.
    """

    keys: int
    used: int
    own: int
    claims: int
    clients: int


def words_of(server: MasterServer) -> Words | None:
    """Count them while no request is handled; None if nothing is lent."""
    with server._lock:
        posts = server._posts
        if posts is None:
            return None
        nbytes = os.fstat(posts._keys).st_size
        with mmap.mmap(posts._keys, nbytes, prot=mmap.PROT_READ) as memory:
            words = np.frombuffer(memory, np.uint64, offset=HEAD_BYTES).reshape(-1, WORDS).copy()
        owners = words[:, 1:] >> np.uint64(8) & np.uint64(0xFFFF)
        claims = int((owners != 0).sum())
        own = int((words[:, 1:] != 0).sum()) - claims + int(words[:, 0].sum())
        office = posts._office
        return Words(server._master.num_keys, office.used, own, claims, office.num_clients)
