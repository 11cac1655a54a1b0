"""Tenants of the KV store: who they are, and how much each may use."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from configs.frozen import Frozen


class TenantConfig(Frozen):
    """One tenant of the pool."""

    name: str = Field(min_length=1, max_length=64, description="What its clients call themselves.")
    token_file: Path = Field(
        description="File with the token that its clients show (at most 256 characters); read when"
        " a master or a client starts."
    )
    quota_bytes: int | None = Field(
        None, ge=0, description="Most bytes of its blocks, copies counted each; none: no limit."
    )

    def token(self) -> str:
        """Read the token. Raises OSError, or ValueError if it is no UTF-8."""
        return self.token_file.read_text(encoding="utf-8").strip()

    def quota_of_shard(self, num_shards: int) -> int | None:
        """Return one master's share of the quota in bytes, rounded up; None: no limit."""
        return None if self.quota_bytes is None else -(-self.quota_bytes // num_shards)
