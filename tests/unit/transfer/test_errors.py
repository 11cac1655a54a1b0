"""Errors keep their fields across processes, and their docstring is the tree."""

from __future__ import annotations

import pickle

import pytest

from transfer import errors

SAMPLES = [
    errors.EngineClosed("closed"),
    errors.HandshakeRefused("host:1", "wrong secret", "name"),
    errors.PeerUnreachable("host:1", "nobody"),
    errors.AddressInvalid("host", "expected HOST:PORT"),
    errors.PeerUnknown("p"),
    errors.PeerLost("p", "burnt", backend="tcp", attempts=2, bytes_moved=3, elapsed_s=0.5),
    errors.AccessRefused("p", "bounds"),
    errors.RegionUnknown("p", "withdrawn"),
    errors.TransferTimeout("p", "write", backend="tcp", bytes_moved=4, elapsed_s=1.0),
    errors.ImmediateTimeout((("p", 1),)),
    errors.Interrupted("view"),
    errors.ProtocolViolation("garbage"),
    errors.StorageFailed("slab", "read", "cut short", offset=4096, errno=5),
    errors.StorageFull("slab", "write", "no room", errno=28),
    errors.StorageBusy("slab", "open", "locked"),
    errors.DeviceUnavailable("cuda:0", "torch has no CUDA"),
    errors.RegistrationFailed(4096, "Cannot allocate memory"),
    errors.ControlError("bad"),
    errors.RpcTimeout("host:1", 2.0),
    errors.RemoteError("ValueError", "no"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: errors.TransferError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def subclasses(kind: type) -> set[type]:
    return {kind, *(x for child in kind.__subclasses__() for x in subclasses(child))}


def test_every_error_is_in_the_tree_and_in_the_samples() -> None:
    found = {k for k in subclasses(errors.TransferError) if k.__module__ == errors.__name__}
    assert {type(error) for error in SAMPLES} | {errors.TransferError} == found
    assert errors.__doc__ is not None
    for kind in found:
        assert kind.__name__ in errors.__doc__
        assert ("(retryable)" in _line(kind.__name__)) == kind.retryable


def _line(name: str) -> str:
    assert errors.__doc__ is not None
    return next(line for line in errors.__doc__.splitlines() if line.split()[:1] == [name])
