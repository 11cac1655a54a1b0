"""Events of the KV store: where routers hear what the pool holds."""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from configs.frozen import Frozen


class EventForm(StrEnum):
    """How one event is written: `array` as vLLM did until June 2026, `map` as it does since."""

    ARRAY = "array"
    MAP = "map"


class EventSecurity(StrEnum):
    """`curve`: members of the cluster only, encrypted. `plain`: whoever reaches the port."""

    CURVE = "curve"
    PLAIN = "plain"


SHARD: Final = "{shard}"  # in an endpoint: the number of the master that has it
PORT_MAX: Final = 65535


def _has_port(endpoint: str) -> str:
    port = endpoint.replace(SHARD, "0").rpartition(":")[2]
    if port.isdigit() and int(port) > PORT_MAX:
        raise ValueError(f"there is no port {port}")
    return endpoint


Endpoint = Annotated[
    str,
    Field(pattern=r"^(tcp://.+:((\d|\{shard\}){1,5}|\*)|ipc:///.+)$"),
    AfterValidator(_has_port),
]


class KVEventsConfig(Frozen):
    """Events of the KV store, in vLLM's wire format."""

    enabled: bool = Field(False, description="Tell subscribers which blocks come and go.")
    endpoint: Endpoint = Field(
        "tcp://127.0.0.1:5557",
        description="Where events are published; port `*` is any, `{shard}` the master's number.",
    )
    replay_endpoint: Endpoint = Field(
        "tcp://127.0.0.1:5558", description="Where missed events are asked for; likewise."
    )
    topic: str = Field("kv-events", max_length=256, description="First frame of each message.")
    form: EventForm = Field(EventForm.ARRAY, description="How one event is written.")
    security: EventSecurity = Field(
        EventSecurity.CURVE, description="Who may subscribe; `plain` is for loopback."
    )
    plain_beyond_loopback: bool = Field(
        False, description="Let `plain` endpoints listen on other addresses than loopback."
    )
    block_tokens: int = Field(
        16, ge=1, description="Tokens per block, as events say it; the store does not use it."
    )
    buffer_batches: int = Field(10_000, ge=1, description="Batches kept for replay.")
    buffer_bytes: int = Field(64 << 20, ge=1 << 10, description="Bytes of batches kept for replay.")
    queue_batches: int = Field(
        10_000, ge=1, description="Batches waiting to be sent; beyond it the state is told anew."
    )
    hwm_batches: int = Field(
        10_000, ge=1, description="Batches waiting for one slow subscriber; beyond it a gap."
    )

    def for_shard(self, shard: int) -> Self:
        """Return those of one master: `{shard}` in an endpoint is its number."""
        names = ("endpoint", "replay_endpoint")
        own = {name: getattr(self, name).replace(SHARD, str(shard)) for name in names}
        return self.model_copy(update=own)

    @model_validator(mode="after")
    def _plain_stays_at_home(self) -> Self:
        if self.security is EventSecurity.PLAIN and not self.plain_beyond_loopback:
            for endpoint in (self.endpoint, self.replay_endpoint):
                if not _is_local(endpoint):
                    raise ValueError(
                        f"{endpoint} is plain and not on loopback: use curve, or "
                        "set plain_beyond_loopback"
                    )
        return self


def _is_local(endpoint: str) -> bool:
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
