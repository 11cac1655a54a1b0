"""What can end a measurement."""

from __future__ import annotations

from moe_runtime.errors import MoeRuntimeError


class TargetEnded(MoeRuntimeError):
    """The process that holds the target memory is gone."""

    target: str
    problem: str

    def _message(self) -> str:
        return f"the target {self.target} ended: {self.problem}"


class TargetSilent(MoeRuntimeError):
    """The target does not answer in time."""

    target: str
    waited_s: float

    def _message(self) -> str:
        return f"the target {self.target} has not answered for {self.waited_s:.0f} s"


class TargetRefused(MoeRuntimeError):
    """The target can't do what it is asked."""

    target: str
    problem: str

    def _message(self) -> str:
        return f"the target {self.target} refused: {self.problem}"


class BytesDiffer(MoeRuntimeError):
    """An operation has ended well, and its bytes are not there."""

    operation: str
    piece: int
    size: str

    def _message(self) -> str:
        return (
            f"{self.operation}: piece {self.piece} of {self.size} bytes does not hold what was sent"
        )


class BackendMissing(MoeRuntimeError):
    """This build, or this machine, has no such backend, or it is not the one that was used."""

    wanted: str
    problem: str

    def _message(self) -> str:
        return f"backend {self.wanted}: {self.problem}"
