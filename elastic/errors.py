"""Errors of membership and recovery.

    ElasticError
    ├── StoreUnavailable       (retryable)
    ├── StoreKeyMissing        (retryable)
    ├── RecordInvalid
    ├── Evicted
    ├── JoinTimeout            (retryable)
    ├── AgreementTimeout
    ├── Stopped
    ├── NoSurvivors
    ├── ExpertsUnavailable     (retryable)
    └── RestartsExhausted

Every error carries its facts as fields and survives pickling. `retryable` says whether the same
call can succeed later without anything else being changed.
"""

from __future__ import annotations

from transfer.typed_error import TypedError


class ElasticError(TypedError):
    """Base of all errors of this package."""


class StoreUnavailable(ElasticError):
    """The membership store did not answer in time, or its connection broke."""

    retryable = True

    operation: str
    problem: str

    def _message(self) -> str:
        return f"membership store: {self.operation} failed: {self.problem}"


class StoreKeyMissing(ElasticError):
    """A value that was waited for was not put before the deadline."""

    retryable = True

    key: str
    waited_s: float

    def _message(self) -> str:
        return f"membership store: no value for {self.key!r} after {self.waited_s:.3g} s"


class RecordInvalid(ElasticError):
    """Bytes that should be a view, a member or a message are not."""

    what: str
    problem: str

    def _message(self) -> str:
        return f"{self.what} is not valid: {self.problem}"


class Evicted(ElasticError):
    """A committed view does not contain this incarnation. It may come back only as a new one."""

    epoch: int
    rank: int
    incarnation: str

    def _message(self) -> str:
        return (
            f"rank {self.rank} (incarnation {self.incarnation}) is not a member of"
            f" the view of epoch {self.epoch}"
        )


class JoinTimeout(ElasticError):
    """No view with this process in it could be committed before the deadline."""

    retryable = True

    rank: int
    waited_s: float
    obstacle: str

    def _message(self) -> str:
        return f"rank {self.rank} could not join within {self.waited_s:.3g} s: {self.obstacle}"


class Stopped(ElasticError):
    """`Coordinator.stop` was called: this process ends, whatever the group is doing."""

    rank: int

    def _message(self) -> str:
        return f"rank {self.rank} was told to stop"


class AgreementTimeout(ElasticError):
    """A view change did not come to an end; `story` tells the last steps."""

    epoch: int
    phase: str
    waited_s: float
    waiting_for: tuple[int, ...]
    story: str

    def _message(self) -> str:
        return (
            f"epoch {self.epoch} is still {self.phase} after {self.waited_s:.3g} s, "
            f"waiting for ranks {list(self.waiting_for)}; last steps: {self.story}"
        )


class NoSurvivors(ElasticError):
    """A plan was asked for that leaves nobody to hold the experts."""

    epoch: int

    def _message(self) -> str:
        return f"the view after epoch {self.epoch} would have no members"


class ExpertsUnavailable(ElasticError):
    """No source had these experts' weights (`experts`: pairs of layer and logical expert)."""

    retryable = True

    experts: tuple[tuple[int, int], ...]
    tried: tuple[str, ...]

    def _message(self) -> str:
        shown = ", ".join(f"{layer}:{logical}" for layer, logical in self.experts[:8])
        sources = ", ".join(self.tried) or "no sources"
        return f"{len(self.experts)} experts (layer:expert {shown}) in none of {sources}"


class RestartsExhausted(ElasticError):
    """A worker died more often than it may be restarted."""

    local_rank: int
    restarts: int

    def _message(self) -> str:
        return f"worker {self.local_rank} was given up after {self.restarts} restarts"
