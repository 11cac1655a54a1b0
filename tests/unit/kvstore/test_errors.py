"""The errors of the store: their tree is the document, and each survives a process boundary."""

from __future__ import annotations

import inspect
import pickle

import pytest

from kvstore import errors


def all_errors():
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.KVStoreError) and kind is not errors.KVStoreError
    ]


def test_the_tree_in_the_docstring_is_the_truth():
    lines = [line for line in errors.__doc__.splitlines() if "──" in line]
    told = {line.split("── ")[1].split()[0] for line in lines}
    assert told == {kind.__name__ for kind in all_errors()}
    for line in lines:
        kind = getattr(errors, line.split("── ")[1].split()[0])
        assert ("(retryable)" in line) == kind.retryable, line
        assert ("ValueError" in line) == issubclass(kind, ValueError), line


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_each_keeps_its_facts_through_pickling(kind):
    samples = {int: 3, float: 0.5, str: "text", bytes: b"\x01\x02"}
    parameters = inspect.signature(kind.__init__).parameters.values()
    facts = {
        p.name: samples[eval(p.annotation, {})] for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    error = kind(**facts)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.fields == error.fields
    for name, value in facts.items():
        assert getattr(copy, name) == value
