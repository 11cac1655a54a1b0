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

from typing import Any, ClassVar


class DispatchError(Exception):
    """Base of all errors of this package."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take keyword fields only, which the default protocol would not pass on.
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[DispatchError], fields: dict[str, object]) -> DispatchError:
    return kind(**fields)  # type: ignore[arg-type]


class PlacementInvalid(DispatchError, ValueError):
    """An expert map that cannot be: unknown experts, duplicates, a wrong number of layers."""

    def __init__(self, *, problem: str) -> None:
        super().__init__(f"expert map: {problem}", problem=problem)
        self.problem = problem


class InputInvalid(DispatchError, ValueError):
    """A tensor handed to a dispatcher is not what the layout promises."""

    def __init__(self, *, name: str, observed: str, expected: str) -> None:
        message = f"{name} is {observed}, expected {expected}"
        super().__init__(message, name=name, observed=observed, expected=expected)
        self.name = name
        self.observed = observed
        self.expected = expected


class CapacityExceeded(DispatchError, ValueError):
    """More tokens in one pass than the receive windows have room for."""

    def __init__(self, *, num_tokens: int, max_tokens: int) -> None:
        message = f"{num_tokens} tokens on this rank, the layout allows {max_tokens}"
        super().__init__(message, num_tokens=num_tokens, max_tokens=max_tokens)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class ExpertUnowned(DispatchError):
    """A token chose an expert without a live copy, and the policy says to wait for one."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, epoch: int, layer: int, experts: tuple[int, ...]) -> None:
        message = f"epoch {epoch}, layer {layer}: no rank holds experts {list(experts)}"
        super().__init__(message, epoch=epoch, layer=layer, experts=experts)
        self.epoch = epoch
        self.layer = layer
        self.experts = experts


class KernelsUnavailable(DispatchError):
    """An operation was asked for on a device that this installation has no kernels for."""

    def __init__(self, *, operation: str, reason: str) -> None:
        super().__init__(f"{operation} cannot run: {reason}", operation=operation, reason=reason)
        self.operation = operation
        self.reason = reason


class Unsupported(DispatchError):
    """A call of another library's interface, or an option of it, that is not there."""

    def __init__(self, *, what: str, instead: str) -> None:
        super().__init__(f"{what} is not supported; there is {instead}", what=what, instead=instead)
        self.what = what
        self.instead = instead


class LayoutMismatch(DispatchError):
    """A member's receive windows were laid out for another configuration."""

    def __init__(self, *, rank: int, name: str, observed: object, expected: object) -> None:
        message = f"rank {rank} offers {name} {observed}, expected {expected}"
        super().__init__(message, rank=rank, name=name, observed=observed, expected=expected)
        self.rank = rank
        self.name = name
        self.observed = observed
        self.expected = expected


class MessageMismatch(DispatchError):
    """A message arrived whose header or counts are not what this phase expects."""

    def __init__(self, *, source: int, name: str, observed: object, expected: object) -> None:
        message = f"message from rank {source}: {name} is {observed}, expected {expected}"
        super().__init__(message, source=source, name=name, observed=observed, expected=expected)
        self.source = source
        self.name = name
        self.observed = observed
        self.expected = expected


class CallOrder(DispatchError):
    """The dispatcher's state does not allow this call."""

    def __init__(self, *, call: str, state: str) -> None:
        super().__init__(f"{call} is not allowed while {state}", call=call, state=state)
        self.call = call
        self.state = state


class StaleEpoch(DispatchError):
    """A handle or an offer belongs to another epoch or exchange than the current one."""

    def __init__(self, *, what: str, observed: str, expected: str) -> None:
        message = f"{what} of {observed}, the current one is {expected}"
        super().__init__(message, what=what, observed=observed, expected=expected)
        self.what = what
        self.observed = observed
        self.expected = expected


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

    retryable: ClassVar[bool] = True

    def __init__(
        self,
        *,
        epoch: int,
        pass_id: int,
        layer: int,
        phase: str,
        suspects: tuple[int, ...],
        evidence: str,
    ) -> None:
        message = (
            f"epoch {epoch}, pass {pass_id}, layer {layer}, {phase}: "
            f"suspects {list(suspects)}: {evidence}"
        )
        super().__init__(
            message,
            epoch=epoch,
            pass_id=pass_id,
            layer=layer,
            phase=phase,
            suspects=suspects,
            evidence=evidence,
        )
        self.epoch = epoch
        self.pass_id = pass_id
        self.layer = layer
        self.phase = phase
        self.suspects = suspects
        self.evidence = evidence
