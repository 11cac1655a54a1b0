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
from moe_runtime.errors import ExpertNotResident
from transfer import TransferError, allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.expert_server import Slabs
    from elastic.expert_source import ExpertId
    from kvstore import StoreClient
    from moe_runtime.models.experts import ExpertBank
    from transfer import Memory, Region, TransferEngine

logger = logging.getLogger(__name__)

PUT_TIMEOUT_S = 10.0


class ExpertBackup:
    """The pool as a source of experts, and the thread that fills it.

    Args:
        engine: The process's engine, open while the thread runs.
        client: The rank's access to the pool.
        bank: Where experts are read from and written to.
        slabs: The bank's memory as regions.
        namespace: Names the weights; experts of other weights have other keys.
    """

    name = "pool"

    def __init__(
        self,
        engine: TransferEngine,
        client: StoreClient,
        bank: ExpertBank,
        slabs: Slabs,
        *,
        namespace: bytes,
    ) -> None:
        self._engine = engine
        self._client = client
        self._bank = bank
        self._slabs = slabs
        self._namespace = namespace
        self._resident: Sequence[ExpertId] = ()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="expert-backup", daemon=True)

    def open(self) -> None:
        """Start copying the experts that are resident now into the pool, once."""
        self._resident = self._bank.resident()  # here: the bank is the rank loop's
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
        copy = allocate(self._bank.blob_bytes)
        region = self._engine.register(copy)
        try:
            for expert in self._resident:
                if self._closing.is_set():
                    return
                if self._copy(expert, copy):
                    self._put(expert, region)
        except (KVStoreError, TransferError) as error:
            # Without the copy an orphaned expert comes from disk.
            logger.warning("no backup of the experts from %s on: %s", expert, error)
        finally:
            self._engine.release(region)
            copy.close()

    def _copy(self, expert: ExpertId, copy: Memory) -> bool:
        """Copy one expert; False if the rank loop took its place meanwhile.

        Written straight from the bank, a place that is given to another expert during the put
        would leave that one's bytes in the pool, under a checksum that agrees with them.
        """
        try:
            location = self._bank.location(*expert)
            copy.tensor.copy_(self._bank.blob(*expert))
            return self._bank.has(*expert) and self._bank.location(*expert) == location
        except ExpertNotResident:
            return False

    def _put(self, expert: ExpertId, region: Region) -> None:
        keys, nbytes = [self._key(expert)], self._bank.blob_bytes
        self._client.put(keys, region, [0], nbytes, pin=True, timeout_s=PUT_TIMEOUT_S)

    def _slab(self, expert: ExpertId) -> int:
        return self._bank.location(*expert).slab

    def _key(self, expert: ExpertId) -> bytes:
        layer, logical = expert
        return named_key(self._namespace, f"expert/{layer}/{logical}")
