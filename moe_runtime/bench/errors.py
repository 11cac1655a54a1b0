"""What can end a measurement."""

from __future__ import annotations

from moe_runtime.errors import MoeRuntimeError


class TargetEnded(MoeRuntimeError):
    """The process that holds the target memory is gone."""

    def __init__(self, *, target: str, problem: str) -> None:
        super().__init__(f"the target {target} ended: {problem}", target=target, problem=problem)


class TargetSilent(MoeRuntimeError):
    """The target does not answer in time."""

    def __init__(self, *, target: str, waited_s: float) -> None:
        message = f"the target {target} has not answered for {waited_s:.0f} s"
        super().__init__(message, target=target, waited_s=waited_s)


class TargetRefused(MoeRuntimeError):
    """The target can't do what it is asked."""

    def __init__(self, *, target: str, problem: str) -> None:
        super().__init__(f"the target {target} refused: {problem}", target=target, problem=problem)


class BytesDiffer(MoeRuntimeError):
    """An operation has ended well, and its bytes are not there."""

    def __init__(self, *, operation: str, piece: int, size: str) -> None:
        message = f"{operation}: piece {piece} of {size} bytes does not hold what was sent"
        super().__init__(message, operation=operation, piece=piece, size=size)


class BackendMissing(MoeRuntimeError):
    """This build, or this machine, has no such backend, or it is not the one that was used."""

    def __init__(self, *, wanted: str, problem: str) -> None:
        super().__init__(f"backend {wanted}: {problem}", wanted=wanted, problem=problem)
