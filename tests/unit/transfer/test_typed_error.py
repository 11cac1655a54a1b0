"""What every error of the project inherits: facts named once, texts, copies across processes."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import random
import traceback
from dataclasses import KW_ONLY

import pytest

from transfer.errors import RpcTimeout, TransferError
from transfer.typed_error import TypedError

PACKAGES = ("transfer", "dispatch", "kvstore", "elastic", "moe_runtime", "moe_runtime.front")


class Sample(TypedError, LookupError):
    """Two facts, one of them with a default."""

    retryable = True

    name: str
    sizes: tuple[int, ...] = ()

    def _message(self) -> str:
        return f"{self.name} of {sum(self.sizes)} bytes"


class Narrower(Sample):
    """One more fact, and the base's text."""

    epoch: int


class Placed(TransferError):
    """As the errors of the transfer engine: by place, but for what follows the marker."""

    name: str
    _: KW_ONLY
    rail: str = ""

    def _message(self) -> str:
        return f"{self.name} by {self.rail or 'no rail'}"


def fresh() -> Sample:
    sizes = tuple(random.randrange(1000) for _ in range(random.randrange(4)))
    return Sample(name=f"piece {random.random()}", sizes=sizes)


def copies(error: TypedError) -> list[TypedError]:
    through = [pickle.loads(pickle.dumps(error, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    return [*through, copy.copy(error), copy.deepcopy(error)]


def test_facts_are_attributes_and_the_text_is_made_of_them() -> None:
    error = fresh()
    assert error.fields == {"name": error.name, "sizes": error.sizes}
    assert str(error) == f"{error.name} of {sum(error.sizes)} bytes"
    assert error.args == (str(error),)
    assert repr(error) == f"Sample(name={error.name!r}, sizes={error.sizes!r})"
    assert traceback.format_exception_only(error)[0].endswith(f"Sample: {error}\n")


def test_facts_are_given_by_name_and_all_of_them() -> None:
    with pytest.raises(TypeError, match="positional"):
        Sample("piece")  # type: ignore[misc]
    with pytest.raises(TypeError, match="name"):
        Sample()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        Sample(name="piece", colour="red")  # type: ignore[call-arg]


def test_a_subclass_adds_facts_and_keeps_the_rest() -> None:
    error = Narrower(name="block", sizes=(2, 3), epoch=7)
    assert str(error) == "block of 5 bytes"
    assert error.fields == {"name": "block", "sizes": (2, 3), "epoch": 7}
    assert error.retryable
    assert isinstance(error, LookupError)


def test_by_place_up_to_the_marker() -> None:
    assert str(Placed("write", rail="eth0")) == "write by eth0"
    with pytest.raises(TypeError, match="positional"):
        Placed("write", "eth0")  # type: ignore[misc]


@pytest.mark.parametrize("noted", [False, True], ids=["plain", "with notes"])
def test_copies_are_whole(noted: bool) -> None:
    for error in (
        fresh(),
        Narrower(name="x", epoch=1),
        Placed("p", rail="r"),
        RpcTimeout("h", 2.0),
    ):
        if noted:
            error.add_note(f"while {random.random()}")
        for again in copies(error):
            assert again is not error
            assert type(again) is type(error)
            assert (again.fields, again.args) == (error.fields, error.args)
            assert repr(again) == repr(error)
            assert getattr(again, "__notes__", None) == getattr(error, "__notes__", None)


def test_errors_are_told_apart_and_can_be_kept_in_sets() -> None:
    one, two = Sample(name="x"), Sample(name="x")
    assert one != two
    assert len({one, two, one}) == 2


def test_the_text_stays_what_it_was_when_the_error_was_made() -> None:
    error = Sample(name="before")
    error.name = "after"
    assert str(error) == "before of 0 bytes"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_errors_of_each_package_have_this_shape(package: str) -> None:
    module = importlib.import_module(f"{package}.errors")
    kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
    found = [kind for kind in kinds if issubclass(kind, Exception)]
    assert len(found) > 3
    assert all(issubclass(kind, TypedError) for kind in found)
