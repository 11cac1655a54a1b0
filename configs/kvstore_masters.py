"""The masters of the KV store: how many, where they are found, and who keeps them in order."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from configs.addresses import check_address
from configs.certificates import check_certificates, check_readable
from configs.frozen import Frozen

MASTERS_MAX = 64


class EtcdConfig(Frozen):
    """An etcd cluster (3.4 or later, with its HTTP gateway) in which masters are elected."""

    endpoints: tuple[str, ...] = Field(
        (),
        description="URLs like `http://10.0.0.1:2379`, tried in turn; none: etcd is not used.",
    )
    prefix: str = Field(
        "/moe-runtime/kvstore",
        pattern=r"^/[^\s]*[^/\s]$",
        description="Where in etcd's key space this pool's records are; one pool, one prefix.",
    )
    lease_s: int = Field(
        5,
        ge=2,
        description="A master that etcd did not hear of for this long may be replaced.",
    )
    timeout_s: float = Field(2.0, gt=0, description="Deadline of one request to etcd.")
    ca_file: Path | None = Field(
        None, description="PEM file with the authorities that signed etcd's certificates."
    )
    cert_file: Path | None = Field(None, description="PEM file with the client's certificate.")
    key_file: Path | None = Field(None, description="PEM file with its key, without a password.")
    user: str | None = Field(None, min_length=1, description="etcd user.")
    password_file: Path | None = Field(None, description="File with that user's password.")

    @property
    def enabled(self) -> bool:
        """Whether there is an etcd."""
        return bool(self.endpoints)

    @field_validator("endpoints")
    @classmethod
    def _are_urls(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in endpoints:
            scheme, separator, place = endpoint.partition("://")
            host, _, port = place.rpartition(":")
            if scheme not in ("http", "https") or not separator or not host or not port.isdigit():
                raise ValueError(f"{endpoint!r} is not like http://host:2379")
        return endpoints

    @field_validator("ca_file", "cert_file")
    @classmethod
    def _hold_certificates(cls, path: Path | None) -> Path | None:
        return path if path is None else check_certificates(path)

    @field_validator("key_file", "password_file")
    @classmethod
    def _are_readable(cls, path: Path | None) -> Path | None:
        return path if path is None else check_readable(path)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: both, or none")
        if (self.user is None) != (self.password_file is None):
            raise ValueError("user and password_file: both, or none")
        return self


class KVMastersConfig(Frozen):
    """The masters of the KV store. Without addresses and etcd, `serve` has the only one in it."""

    addresses: tuple[str, ...] = Field(
        (),
        max_length=MASTERS_MAX,
        description="Where the masters listen (`host:port`), in the order of their shards.",
    )
    shards: int = Field(
        1,
        ge=1,
        le=MASTERS_MAX,
        description="Masters that split the keys among them, where etcd says where they are; "
        "else there are as many as addresses.",
    )
    rebuild_s: float = Field(
        2.0,
        ge=0,
        description="A master that took over calls no block missing for good before nodes had this"
        " long to tell it what they hold.",
    )
    etcd: EtcdConfig = EtcdConfig()

    @field_validator("addresses")
    @classmethod
    def _can_be_called(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_address, addresses))

    @property
    def num_shards(self) -> int:
        """Masters that lead at a time."""
        return len(self.addresses) or self.shards

    @property
    def embedded(self) -> bool:
        """Whether `serve` runs the master itself."""
        return not self.addresses and not self.etcd.enabled

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.addresses and self.etcd.enabled:
            raise ValueError("addresses or etcd: one of them says where the masters are")
        if self.addresses and self.shards not in (1, len(self.addresses)):
            raise ValueError(f"{len(self.addresses)} addresses, but {self.shards} shards")
        if len(set(self.addresses)) != len(self.addresses):
            raise ValueError("two shards name one address")
        if self.shards > 1 and self.embedded:
            raise ValueError("several shards need addresses, or etcd to find their masters")
        return self
