"""What the store's master does by itself: copies between nodes and tiers, within bounds."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from configs.frozen import Frozen


class Admission(StrEnum):
    """Which blocks that leave DRAM may go to the SSD: `always` all, `second_hit` those used again
    since they were stored, `never` none.
    """

    ALWAYS = "always"
    SECOND_HIT = "second_hit"
    NEVER = "never"


class CopyBounds(Frozen):
    """Copies by the master's order that one node makes at once."""

    per_node: int = Field(256, ge=1, le=1024, description="Copies under way per source node.")
    bytes_per_node: int = Field(
        64 << 20, ge=1 << 16, description="Bytes of them; one larger copy goes alone."
    )
    queued_max: int = Field(
        1 << 16, ge=1, description="Copies waiting for their turn; further ones are not ordered."
    )
    deadline_s: float = Field(
        30.0, gt=0, description="Longest time of a copy; then its target bytes are quarantined."
    )
    attempts: int = Field(3, ge=1, le=100, description="Tries of one copy.")


class TierPolicy(Frozen):
    """What moves between DRAM and SSD."""

    admission: Admission = Field(
        Admission.ALWAYS, description="Which blocks that leave DRAM may go to the SSD."
    )
    admission_names: int = Field(
        1 << 17, ge=16, description="Names of used blocks that `second_hit` remembers."
    )
    demotion_low: float = Field(
        0.05, ge=0, lt=1, description="Below this free share, DRAM's next victims go to the SSD."
    )
    demotion_high: float = Field(0.1, gt=0, lt=1, description="They go until this share is free.")
    overflow_free: float = Field(
        0.05,
        ge=0,
        le=1,
        description="An SSD with more free than this share takes puts before what it should have "
        "is evicted from DRAM for them; 1: none does.",
    )
    promotion_hits: int = Field(
        2, ge=0, description="Hits that bring a block from the SSD to DRAM; 0: none do."
    )
    promotion_window_s: float = Field(
        60.0, gt=0, description="Hits longer ago than this to twice this do not count."
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.demotion_low >= self.demotion_high:
            raise ValueError("demotion_low must be below demotion_high")
        return self


class HotBlockPolicy(Frozen):
    """Further replicas of what is read very often."""

    hits: int = Field(0, ge=0, description="Hits per window that earn a replica; 0: none do.")
    window_s: float = Field(10.0, gt=0, description="Length of the window.")
    replicas_max: int = Field(3, ge=2, le=8, description="Most copies of a block that this makes.")


class FillingPolicy(Frozen):
    """How a node that joined gets its share of the blocks."""

    bytes_per_s: int = Field(
        32 << 20, ge=0, description="Bytes moved to joined nodes; 0: nothing is moved to them."
    )
    tolerance: float = Field(
        0.05, gt=0, lt=1, description="A node filled to this much below the mean is filled enough."
    )
    puts_max: float = Field(
        2.0,
        gt=0,
        le=1e6,
        description="New bytes that a joined node gets until then, per byte of capacity, as a "
        "multiple of what the others get at most.",
    )


class PolicyConfig(Frozen):
    """What the store's master does by itself."""

    copies: CopyBounds = CopyBounds()
    tiers: TierPolicy = TierPolicy()
    hot_blocks: HotBlockPolicy = HotBlockPolicy()
    filling: FillingPolicy = FillingPolicy()
