"""Every knob of moe-runtime: a frozen pydantic model per component, composed in `RuntimeConfig`.

A component receives its own model only (`transfer` gets a `TransferConfig`), so what it can
depend on is visible in its constructor. Units are the last word of a name: `_s` seconds,
`_bytes` bytes, `_tokens` tokens.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from configs.certificates import check_certificates, check_pair, check_readable
from configs.dispatch_options import CombineMode, CombineWire, DispatchWire
from configs.files import DirectIO as DirectIO
from configs.files import FileConfig as FileConfig
from configs.files import SyncPolicy as SyncPolicy
from configs.frozen import Frozen
from configs.kv_events import KVEventsConfig as KVEventsConfig
from configs.kvstore import Eviction as Eviction
from configs.kvstore import KVStoreConfig as KVStoreConfig


class DType(StrEnum):
    """Type of weights and KV cache; `auto` takes the checkpoint's own."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Exactness(StrEnum):
    """`bitwise`: a token's logits are the same bits however they were computed.
    `tolerant`: the fastest path, equal only within rounding.
    """

    BITWISE = "bitwise"
    TOLERANT = "tolerant"


class TransferBackend(StrEnum):
    """`auto` picks shared memory on the same host, else RDMA verbs if both sides have devices, else
    tcp, peer by peer.
    """

    AUTO = "auto"
    SHARED_MEMORY = "shared_memory"
    VERBS = "verbs"
    TCP = "tcp"


class MissingExperts(StrEnum):
    """What happens to an expert without a live copy: `wait` loads it first, `degrade` skips it."""

    WAIT = "wait"
    DEGRADE = "degrade"


class ModelConfig(Frozen):
    """Which checkpoint is served, and how exactly."""

    path: Path = Field(
        description="Hugging Face checkpoint directory: config.json, tokenizer.json, *.safetensors."
    )
    served_name: str | None = Field(
        None, description="Name in /v1/models; default: the directory's name."
    )
    dtype: DType = DType.AUTO
    exactness: Exactness = Exactness.BITWISE
    threads: int = Field(1, ge=1, description="Compute threads per worker process.")


class TransferShares(Frozen):
    """Weights by which classes of traffic share the rails of a peer."""

    activations: float = Field(32, gt=0, description="Weight of activations.")
    kv_get: float = Field(16, gt=0, description="Weight of KV blocks that are read.")
    kv_put: float = Field(8, gt=0, description="Weight of KV blocks that are written.")
    weights: float = Field(4, gt=0, description="Weight of expert weights.")
    migration: float = Field(2, gt=0, description="Weight of whatever moves without haste.")


class TransferTls(Frozen):
    """Certificates for the connections between hosts: all three files, or none and no TLS."""

    certificate: Path | None = Field(
        None, description="PEM file with the certificate of this process, and its chain."
    )
    private_key: Path | None = Field(
        None, description="PEM file with the key of that certificate, without a password."
    )
    authority: Path | None = Field(
        None, description="PEM file with the authority that signed the certificates of all members."
    )

    @field_validator("certificate", "authority")
    @classmethod
    def _holds_certificates(cls, path: Path | None) -> Path | None:
        return path if path is None else check_certificates(path)

    @field_validator("private_key")
    @classmethod
    def _is_readable(cls, path: Path | None) -> Path | None:
        return path if path is None else check_readable(path)

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        given = self.certificate, self.private_key, self.authority
        if any(given) and not all(given):
            raise ValueError("certificate, private_key and authority: all of them, or none")
        if self.certificate is not None and self.private_key is not None:
            check_pair(self.certificate, self.private_key)
        return self

    @property
    def enabled(self) -> bool:
        """Whether connections between hosts are encrypted."""
        return self.authority is not None


Pattern = Annotated[str, Field(min_length=1, max_length=64)]
Patterns = tuple[Pattern, ...]


class TransferConfig(Frozen):
    """The transfer engine of one process."""

    backend: TransferBackend = TransferBackend.AUTO
    host: str = Field("127.0.0.1", description="Address to listen on and to advertise.")
    tcp_connections: int = Field(2, ge=1, le=16, description="Data connections per tcp peer.")
    handshake_timeout_s: float = Field(
        5.0, gt=0, description="Deadline of a connection with its mutual authentication."
    )
    resume_timeout_s: float = Field(
        5.0,
        gt=0,
        description="How long a broken control connection may take to come back over any address"
        " before the peer counts as lost.",
    )
    operation_timeout_s: float = Field(
        30.0, gt=0, description="Deadline of an operation that names none."
    )
    notify_bytes_max: int = Field(16 << 20, ge=1024, description="Largest notify payload.")
    rails: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="Local addresses, one per network card, over which tcp bytes are spread;"
        " none: `host` alone.",
    )
    devices: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="RDMA devices over which bytes are spread, as mlx5_0 or mlx5_0:2 for another"
        " port than the first; none: all that are up.",
    )
    interfaces_include: Patterns = Field(
        (),
        max_length=64,
        description="Where `rails` names none: patterns, as eth*, of network interfaces whose first"
        " addresses are the rails. A loopback interface is taken only if a pattern matches it.",
    )
    interfaces_exclude: Patterns = Field(
        (),
        max_length=64,
        description="The same, of interfaces that are not used; alone: all others that are up are.",
    )
    devices_include: Patterns = Field(
        (),
        max_length=64,
        description="Where `devices` names none: patterns, as mlx5_[0-3], of RDMA devices to use.",
    )
    devices_exclude: Patterns = Field(
        (), max_length=64, description="The same, of RDMA devices that are not used."
    )
    shares: TransferShares = TransferShares()
    tls: TransferTls = TransferTls()
    process_memory: bool = Field(
        True,
        description="Reach memory of same-host peers that cannot be mapped by process_vm_readv"
        " and process_vm_writev, and tell them the addresses of ours.",
    )

    @model_validator(mode="after")
    def _keeps_bytes_secret(self) -> Self:
        if self.tls.enabled and (self.backend is TransferBackend.VERBS or self.devices):
            raise ValueError("tls cannot encrypt what RDMA devices move: not with verbs or devices")
        return self


class DispatchConfig(Frozen):
    """Token dispatch and combine across expert-parallel ranks."""

    pass_timeout_s: float = Field(
        2.0, gt=0, description="Longest silence of a peer inside a pass before it is suspected."
    )
    microbatches: int = Field(
        1, ge=1, le=4, description="Exchanges that may be in flight at once; each has own windows."
    )
    microbatch_tokens: int | None = Field(
        None,
        ge=1,
        description="A pass in which a rank has more tokens is computed as two microbatches, whose"
        " messages travel while the other one's experts compute; default: never. Needs microbatches"
        " >= 2.",
    )
    combine: CombineMode = Field(
        CombineMode.EXACT, description="Where the results of a token's experts are added up."
    )
    dispatch_wire: DispatchWire = Field(
        DispatchWire.NATIVE, description="What rows are on their way to the experts."
    )
    combine_wire: CombineWire = Field(
        CombineWire.NATIVE, description="What results are on their way back."
    )
    window_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens per rank that receive windows are sized for; default: all that a pass "
        "may have. They grow when a message needs more.",
    )
    window_slack: float = Field(
        2.0,
        gt=0,
        description="Receive windows hold this many times a rank's even share of the choices.",
    )

    @model_validator(mode="after")
    def _has_windows_for_both(self) -> Self:
        if self.microbatch_tokens is not None and self.microbatches < 2:
            raise ValueError("microbatch_tokens needs windows for both halves: microbatches >= 2")
        return self


class ElasticConfig(Frozen):
    """Membership, views and recovery."""

    missing_experts: MissingExperts = MissingExperts.WAIT
    bootstrap_timeout_s: float = Field(
        60.0, gt=0, description="How long the first view waits for all expected workers."
    )
    install_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Deadline for all to have a committed view ready, with its experts loaded.",
    )
    watch_interval_s: float = Field(
        0.5, gt=0, description="How often an idle rank reads the view record."
    )
    stall_threshold_s: float = Field(
        1.0, gt=0, description="A detector that slept longer than this accuses nobody."
    )
    store_timeout_s: float = Field(
        10.0, gt=0, description="Deadline of one membership-store operation."
    )
    restart_backoff_s: float = Field(
        0.2, ge=0, description="Pause before the agent restarts a worker that died at once again."
    )
    max_restarts: int = Field(
        100, ge=0, description="Restarts of one worker slot before the agent gives it up."
    )


class SchedulerConfig(Frozen):
    """Continuous batching on one rank."""

    token_budget: int = Field(
        256, ge=1, description="Most tokens one rank computes in a pass (the same on every rank)."
    )
    max_running: int = Field(32, ge=1, description="Most requests decoded at once on one rank.")
    page_tokens: int = Field(16, ge=1, description="Tokens per KV page, and per block of the pool.")
    num_pages: int = Field(1024, ge=2, description="KV pages per rank.")
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        description="Prompt + output limit; default: the model's own, capped by the pages.",
    )


class FrontConfig(Frozen):
    """The HTTP front end."""

    host: str = Field("127.0.0.1", description="Address of the HTTP server.")
    port: int = Field(8000, ge=0, le=65535, description="0 picks a free port.")
    max_open_requests: int = Field(256, ge=1, description="More are refused with 429.")
    request_timeout_s: float = Field(
        600.0, gt=0, description="A request that got no token for this long is failed."
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="On SIGTERM, open requests get this long to finish."
    )


class ClusterConfig(Frozen):
    """Who takes part."""

    workers: int = Field(4, ge=1, le=1024, description="Workers expected for the first view.")
    membership_host: str = Field("127.0.0.1", description="Where workers find the front.")
    membership_port: int = Field(
        0, ge=0, le=65535, description="TCPStore port of the front; 0 picks a free one."
    )
    secret_file: Path | None = Field(
        None, description="File with the cluster secret; default: a fresh secret for this run."
    )


class RuntimeConfig(Frozen):
    """The whole of it."""

    model: ModelConfig
    cluster: ClusterConfig = ClusterConfig()
    transfer: TransferConfig = TransferConfig()
    dispatch: DispatchConfig = DispatchConfig()
    kvstore: KVStoreConfig = KVStoreConfig()
    elastic: ElasticConfig = ElasticConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    front: FrontConfig = FrontConfig()

    @model_validator(mode="after")
    def _workers_act_for_somebody(self) -> Self:
        # Masters elsewhere are started from the same file, and act for nobody.
        if self.kvstore.masters.embedded:
            self.kvstore.tenant_of_workers()
        return self
