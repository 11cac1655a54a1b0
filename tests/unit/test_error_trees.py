"""The errors of the packages: the tree that a docstring draws is the tree, and copies are whole."""

from __future__ import annotations

import importlib
import inspect
import pickle
import random
import secrets
from dataclasses import fields

import pytest

from transfer.typed_error import TypedError

MODULES = [
    importlib.import_module(f"{package}.errors")
    for package in ("dispatch", "elastic", "kvstore", "moe_runtime", "moe_runtime.front")
]
MAKERS = {
    "str": lambda: secrets.token_hex(4),
    "str | None": lambda: random.choice([None, "text"]),
    "int": lambda: random.randrange(1000),
    "int | None": lambda: random.choice([None, 7]),
    "float": random.random,
    "bytes": lambda: secrets.token_bytes(8),
    "object": lambda: random.choice(["text", 3, (1, 2)]),
    "tuple[int, ...]": lambda: tuple(random.randrange(9) for _ in range(3)),
    "tuple[str, ...]": lambda: ("here", "there")[: random.randrange(3)],
    "tuple[tuple[int, int], ...]": lambda: ((0, random.randrange(9)), (1, 2)),
}


def errors_of(module) -> list[type[TypedError]]:
    found = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
    return [k for k in found if issubclass(k, TypedError) and k.__module__ == module.__name__]


ERRORS = [kind for module in MODULES for kind in errors_of(module)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_tree_in_the_docstring_is_the_truth(module):
    lines = [line for line in module.__doc__.splitlines() if "── " in line]
    drawn = {line.split("── ")[1].split()[0]: line for line in lines}
    assert len(drawn) == len(lines)
    roots = {kind.__name__ for kind in errors_of(module)} - set(drawn)
    assert len(roots) == (module.__name__ != "moe_runtime.front.errors")
    for name, line in drawn.items():
        kind = getattr(module, name)
        if "retryable" in module.__doc__:
            assert ("(retryable)" in line) == kind.retryable, line
        assert ("ValueError" in line) == issubclass(kind, ValueError), line
    above: list[str] = []  # the names that the lines before stand under
    for line in lines:
        depth = line.index("── ") // 4
        name = line.split("── ")[1].split()[0]
        above = above[: depth - lines[0].index("── ") // 4]
        if above:
            assert issubclass(getattr(module, name), getattr(module, above[-1])), line
        above.append(name)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_each_says_what_it_knows_and_keeps_it(kind):
    facts = {fact.name: MAKERS[fact.type]() for fact in fields(kind) if fact.init}
    error = kind(**facts)
    assert error.fields == facts
    assert {name: getattr(error, name) for name in facts} == facts
    assert "\n" not in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.fields, repr(copy)) == (str(error), facts, repr(error))
