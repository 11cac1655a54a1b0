"""Errors of token dispatch.

    DispatchError
    ├── PlacementInvalid  (ValueError)   an expert map that contradicts itself
    ├── InputInvalid      (ValueError)   a tensor of the wrong shape, type, place or content
    ├── CapacityExceeded  (ValueError)   more tokens than the windows were sized for
    ├── ExpertUnowned     (retryable)    a chosen expert lives nowhere, and the policy is to wait
    ├── Unsupported                      a call or an option that is not there
    ├── KernelsUnavailable               no kernels for the device of these tensors
    ├── LayoutMismatch                   a member was configured with other sizes than this one
    ├── MessageMismatch                  a message is not the one that was due
    ├── CallOrder                        a call that this state does not allow
    ├── StaleEpoch                       a handle or offer of another epoch, or used twice
    └── PassFailed        (retryable)    the pass cannot complete with these members

Every error carries its facts as fields and survives pickling. Those that stem from a call's
arguments are raised before anything is sent. `retryable` says whether the same pass can succeed
after the next `prepare` and `install` without the caller's code being changed.
"""

from __future__ import annotations

from transfer.typed_error import TypedError


class DispatchError(TypedError):
    """Base of all errors of this package."""


class PlacementInvalid(DispatchError, ValueError):
    """An expert map that cannot be: unknown experts, duplicates, a wrong number of layers."""

    problem: str

    def _message(self) -> str:
        return f"expert map: {self.problem}"


class InputInvalid(DispatchError, ValueError):
    """A tensor handed to a dispatcher is not what the layout promises."""

    name: str
    observed: str
    expected: str

    def _message(self) -> str:
        return f"{self.name} is {self.observed}, expected {self.expected}"


class CapacityExceeded(DispatchError, ValueError):
    """More tokens in one pass than the receive windows have room for."""

    num_tokens: int
    max_tokens: int

    def _message(self) -> str:
        return f"{self.num_tokens} tokens on this rank, the layout allows {self.max_tokens}"


class ExpertUnowned(DispatchError):
    """A token chose an expert without a live copy, and the policy says to wait for one."""

    retryable = True

    epoch: int
    layer: int
    experts: tuple[int, ...]

    def _message(self) -> str:
        return f"epoch {self.epoch}, layer {self.layer}: no rank holds experts {list(self.experts)}"


class KernelsUnavailable(DispatchError):
    """An operation was asked for on a device that this installation has no kernels for."""

    operation: str
    reason: str

    def _message(self) -> str:
        return f"{self.operation} cannot run: {self.reason}"


class Unsupported(DispatchError):
    """A call of another library's interface, or an option of it, that is not there."""

    what: str
    instead: str

    def _message(self) -> str:
        return f"{self.what} is not supported; there is {self.instead}"


class LayoutMismatch(DispatchError):
    """A member's receive windows were laid out for another configuration."""

    rank: int
    name: str
    observed: object
    expected: object

    def _message(self) -> str:
        return f"rank {self.rank} offers {self.name} {self.observed}, expected {self.expected}"


class MessageMismatch(DispatchError):
    """A message arrived whose header or counts are not what this phase expects."""

    source: int
    name: str
    observed: object
    expected: object

    def _message(self) -> str:
        return (
            f"message from rank {self.source}: {self.name} is {self.observed},"
            f" expected {self.expected}"
        )


class CallOrder(DispatchError):
    """The dispatcher's state does not allow this call."""

    call: str
    state: str

    def _message(self) -> str:
        return f"{self.call} is not allowed while {self.state}"


class StaleEpoch(DispatchError):
    """A handle or an offer belongs to another epoch or exchange than the current one."""

    what: str
    observed: str
    expected: str

    def _message(self) -> str:
        return f"{self.what} of {self.observed}, the current one is {self.expected}"


class PassFailed(DispatchError):
    """The pass cannot complete: a member was lost or stayed silent.

    Attributes:
        epoch: Epoch of the pass.
        pass_id: Which pass of the epoch, counted from 0.
        layer: Layer of the exchange that failed.
        phase: `dispatch` or `combine`.
        suspects: Ranks that were lost or whose message is missing; empty if nobody can be named.
        evidence: What was observed, for logs and for the abort message.
    """

    retryable = True

    epoch: int
    pass_id: int
    layer: int
    phase: str
    suspects: tuple[int, ...]
    evidence: str

    def _message(self) -> str:
        return (
            f"epoch {self.epoch}, pass {self.pass_id}, layer {self.layer}, {self.phase}: "
            f"suspects {list(self.suspects)}: {self.evidence}"
        )
