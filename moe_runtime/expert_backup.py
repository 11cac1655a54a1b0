"""Expert weights in the KV pool: written there by who holds them, read back by who lost them.

The pool places a block on another worker than its writer's, so that a copy survives the death of
the only rank that held the expert. Writing goes on in the background after each join; reading is
one of the sources of `elastic.ExpertLoader`.
"""

from __future__ import annotations

import logging
import threading
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from kvstore import KVStoreError, named_key
from transfer import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.expert_source import ExpertId
    from elastic.peer_experts import Slabs
    from kvstore import StoreClient
    from moe_runtime.models.experts import ExpertBank

logger = logging.getLogger(__name__)

PUT_TIMEOUT_S = 10.0


class ExpertBackup:
    """The pool as a source of experts, and the thread that fills it.

    Args:
        client: The rank's access to the pool.
        bank: Where experts are read from and written to.
        slabs: The bank's memory as regions.
        namespace: Names the weights; experts of other weights have other keys.
    """

    name = "pool"

    def __init__(
        self, client: StoreClient, bank: ExpertBank, slabs: Slabs, *, namespace: bytes
    ) -> None:
        self._client = client
        self._bank = bank
        self._slabs = slabs
        self._namespace = namespace
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="expert-backup", daemon=True)

    def open(self) -> None:
        """Start copying the resident experts into the pool, once."""
        self._thread.start()

    def close(self) -> None:
        """End after the expert in progress."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def fetch(self, wanted: Sequence[ExpertId]) -> list[ExpertId]:
        """Copy as many of `wanted` as the pool has into their reserved places; verified."""
        filled: list[ExpertId] = []
        by_slab = groupby(sorted(wanted, key=self._slab), key=self._slab)
        for slab, experts in by_slab:
            filled += self._fetch_into(slab, list(experts))
        return filled

    def _fetch_into(self, slab: int, experts: list[ExpertId]) -> list[ExpertId]:
        filled: list[ExpertId] = []
        start = 0
        while start < len(experts):
            # A lookup finds the leading run that is there; behind a gap it is asked again.
            hit = self._client.lookup_prefix([self._key(expert) for expert in experts[start:]])
            if hit.num_blocks == 0:
                start += 1
                continue
            run = experts[start : start + hit.num_blocks]
            offsets = np.array([self._bank.location(*expert).offset for expert in run])
            try:
                good = self._client.get_into(hit, self._slabs.region(slab), offsets)
            finally:
                self._client.release(hit)
            filled += run[:good]
            start += max(good, 1)
        return filled

    def _write_all(self) -> None:
        for expert in self._bank.resident():
            if self._closing.is_set():
                return
            location = self._bank.location(*expert)
            try:
                self._client.put(
                    [self._key(expert)],
                    self._slabs.region(location.slab),
                    [location.offset],
                    location.nbytes,
                    pin=True,
                    timeout_s=PUT_TIMEOUT_S,
                )
            except (KVStoreError, TransferError) as error:
                # Without the copy an orphaned expert comes from disk.
                logger.warning("no backup of the experts from %s on: %s", expert, error)
                return

    def _slab(self, expert: ExpertId) -> int:
        return self._bank.location(*expert).slab

    def _key(self, expert: ExpertId) -> bytes:
        layer, logical = expert
        return named_key(self._namespace, f"expert/{layer}/{logical}")
