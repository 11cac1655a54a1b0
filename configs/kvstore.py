"""The pooled KV-cache store."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from configs.frozen import Frozen
from configs.kv_events import KVEventsConfig
from configs.kvstore_admin import KVAdminConfig
from configs.kvstore_masters import KVMastersConfig
from configs.kvstore_policies import PolicyConfig
from configs.kvstore_segments import ScrubConfig, SegmentConfig
from configs.kvstore_tenants import TenantConfig


class Eviction(StrEnum):
    """Which blocks of the pool make room: `lru` the least recently used, `s3_fifo` those not used
    again soon, `prefix_aware` the leaves that are seen to be of least use.
    """

    LRU = "lru"
    S3_FIFO = "s3_fifo"
    PREFIX_AWARE = "prefix_aware"


class KVStoreConfig(Frozen):
    """The pooled KV-cache store."""

    enabled: bool = Field(True, description="Lend memory to the pool, and use it.")
    segment_bytes: int = Field(
        64 << 20, ge=1 << 16, description="DRAM that each worker lends to the pool."
    )
    segments: tuple[SegmentConfig, ...] = Field(
        (),
        max_length=64,
        description="What each worker lends, one segment after the other; none: DRAM of"
        " `segment_bytes`. `{slot}` in a path is the worker's slot.",
    )
    verify_bytes: int = Field(
        1 << 30,
        ge=0,
        description="Bytes of a segment that are verified before a node tells a master what it"
        " holds; the others are by the scrubber, and by who reads them.",
    )
    copy_bytes: int = Field(
        16 << 20, ge=1 << 20, description="Most bytes of the master's copies under way in a node."
    )
    share_copies: bool = Field(
        True,
        description="Copies of 8 MiB and more are shared with a second core while one is idle; one"
        " client or node that says no keeps its whole process from it.",
    )
    scrub: ScrubConfig = ScrubConfig()
    lease_s: float = Field(
        10.0, gt=0, description="How long a looked-up block is safe from eviction."
    )
    view_bytes: int = Field(
        1 << 30,
        ge=0,
        description="Most bytes of the pool that one client reads in place at a time: as long as it"
        " does, they are not evicted.",
    )
    eviction: Eviction = Field(Eviction.LRU, description="Which blocks make room for others.")
    request_timeout_s: float = Field(
        2.0, gt=0, description="Deadline of one request to the store master."
    )
    heartbeat_s: float = Field(
        1.0, gt=0, description="How often a store node tells the master that it is alive."
    )
    node_silence_s: float = Field(
        10.0,
        gt=0,
        description="The master forgets a node's blocks after this silence, until it speaks again.",
    )
    open_put_s: float = Field(
        30.0,
        gt=0,
        description="Longest time from allocation to commit; then the space is quarantined.",
    )
    put_queue_blocks: int = Field(
        256,
        ge=1,
        description="Full blocks waiting to be written through; beyond it the newest are skipped.",
    )
    expert_backup: bool = Field(
        True,
        description="Keep a copy of each expert in the pool, on another worker than its owner.",
    )
    tenants: tuple[TenantConfig, ...] = Field(
        (),
        max_length=4096,
        description="Who may use the pool; none: whoever holds the cluster secret, without quotas.",
    )
    tenant: str | None = Field(
        None, min_length=1, description="For whom the workers use the pool: one of `tenants`."
    )
    masters: KVMastersConfig = KVMastersConfig()
    events: KVEventsConfig = KVEventsConfig()
    admin: KVAdminConfig = KVAdminConfig()
    policies: PolicyConfig = PolicyConfig()

    @property
    def lent(self) -> tuple[SegmentConfig, ...]:
        """The segments of a node, by their numbers."""
        return self.segments or (SegmentConfig(bytes=self.segment_bytes),)

    def for_slot(self, slot: int) -> Self:
        """Return what the worker of one slot lends: `{slot}` in a path is its number."""
        segments = tuple(
            segment
            if segment.path is None
            else segment.model_copy(
                update={"path": Path(str(segment.path).replace("{slot}", str(slot)))}
            )
            for segment in self.segments
        )
        return self.model_copy(update={"segments": segments})

    @model_validator(mode="after")
    def _one_tenant_per_name(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names):
            raise ValueError("two tenants have one name")
        if self.tenant is not None and self.tenant not in names:
            raise ValueError(f"tenant {self.tenant!r} is none of the tenants {names}")
        return self

    def tenant_of_workers(self) -> TenantConfig | None:
        """Return for whom workers act; None: nobody in particular, as there are no tenants.

        Raises:
            ValueError: There are tenants, and none of them was chosen.
        """
        if self.tenants and self.tenant is None:
            names = [tenant.name for tenant in self.tenants]
            raise ValueError(f"kvstore.tenant must say which of {names} the workers act for")
        return next((t for t in self.tenants if t.name == self.tenant), None)

    @model_validator(mode="after")
    def _one_owner_per_file(self) -> Self:
        paths = [segment.path for segment in self.segments if segment.path is not None]
        if len(set(paths)) != len(paths):
            raise ValueError("two segments name one path")
        return self
