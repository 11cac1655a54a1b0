"""Values that DeepEP's callers hand around and that mean nothing here."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Config:
    """How many multiprocessors and how large chunks; accepted, never used."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: memory is taken when sizes are known."""
        del hidden_bytes, num_ranks
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: memory is taken when sizes are known."""
        del hidden_bytes, num_ranks
        return 0


class EventOverlap:
    """An event that has happened: what returned it is complete, or is completed by its hook."""

    def __init__(self, event: Any = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Return at once."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.current_stream_wait()
