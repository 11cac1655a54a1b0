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

from typing import Any, ClassVar


class ElasticError(Exception):
    """Base of all errors of this package."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take keyword fields only, which the default protocol would not pass on.
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[ElasticError], fields: dict[str, object]) -> ElasticError:
    return kind(**fields)  # type: ignore[arg-type]


class StoreUnavailable(ElasticError):
    """The membership store did not answer in time, or its connection broke."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, operation: str, problem: str) -> None:
        message = f"membership store: {operation} failed: {problem}"
        super().__init__(message, operation=operation, problem=problem)
        self.operation = operation
        self.problem = problem


class StoreKeyMissing(ElasticError):
    """A value that was waited for was not put before the deadline."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, key: str, waited_s: float) -> None:
        message = f"membership store: no value for {key!r} after {waited_s:.3g} s"
        super().__init__(message, key=key, waited_s=waited_s)
        self.key = key
        self.waited_s = waited_s


class RecordInvalid(ElasticError):
    """Bytes that should be a view, a member or a message are not."""

    def __init__(self, *, what: str, problem: str) -> None:
        super().__init__(f"{what} is not valid: {problem}", what=what, problem=problem)
        self.what = what
        self.problem = problem


class Evicted(ElasticError):
    """A committed view does not contain this incarnation. It may come back only as a new one."""

    def __init__(self, *, epoch: int, rank: int, incarnation: str) -> None:
        message = (
            f"rank {rank} (incarnation {incarnation}) is not a member of the view of epoch {epoch}"
        )
        super().__init__(message, epoch=epoch, rank=rank, incarnation=incarnation)
        self.epoch = epoch
        self.rank = rank
        self.incarnation = incarnation


class JoinTimeout(ElasticError):
    """No view with this process in it could be committed before the deadline."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, rank: int, waited_s: float, obstacle: str) -> None:
        message = f"rank {rank} could not join within {waited_s:.3g} s: {obstacle}"
        super().__init__(message, rank=rank, waited_s=waited_s, obstacle=obstacle)
        self.rank = rank
        self.waited_s = waited_s
        self.obstacle = obstacle


class Stopped(ElasticError):
    """`Coordinator.stop` was called: this process ends, whatever the group is doing."""

    def __init__(self, *, rank: int) -> None:
        super().__init__(f"rank {rank} was told to stop", rank=rank)
        self.rank = rank


class AgreementTimeout(ElasticError):
    """A view change did not come to an end; `story` tells the last steps."""

    def __init__(
        self, *, epoch: int, phase: str, waited_s: float, waiting_for: tuple[int, ...], story: str
    ) -> None:
        message = (
            f"epoch {epoch} is still {phase} after {waited_s:.3g} s, "
            f"waiting for ranks {list(waiting_for)}; last steps: {story}"
        )
        super().__init__(
            message,
            epoch=epoch,
            phase=phase,
            waited_s=waited_s,
            waiting_for=waiting_for,
            story=story,
        )
        self.epoch = epoch
        self.phase = phase
        self.waited_s = waited_s
        self.waiting_for = waiting_for
        self.story = story


class NoSurvivors(ElasticError):
    """A plan was asked for that leaves nobody to hold the experts."""

    def __init__(self, *, epoch: int) -> None:
        super().__init__(f"the view after epoch {epoch} would have no members", epoch=epoch)
        self.epoch = epoch


class ExpertsUnavailable(ElasticError):
    """No source had these experts' weights (`experts`: pairs of layer and logical expert)."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, experts: tuple[tuple[int, int], ...], tried: tuple[str, ...]) -> None:
        shown = ", ".join(f"{layer}:{logical}" for layer, logical in experts[:8])
        sources = ", ".join(tried) or "no sources"
        message = f"{len(experts)} experts (layer:expert {shown}) in none of {sources}"
        super().__init__(message, experts=experts, tried=tried)
        self.experts = experts
        self.tried = tried


class RestartsExhausted(ElasticError):
    """A worker died more often than it may be restarted."""

    def __init__(self, *, local_rank: int, restarts: int) -> None:
        message = f"worker {local_rank} was given up after {restarts} restarts"
        super().__init__(message, local_rank=local_rank, restarts=restarts)
        self.local_rank = local_rank
        self.restarts = restarts
