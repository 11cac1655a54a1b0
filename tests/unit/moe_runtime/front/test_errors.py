from __future__ import annotations

import pickle

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.front import errors


def subclasses(kind):
    found = []
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            found += [child, *subclasses(child)]
    return found


def test_the_tree_in_the_docstring_is_the_tree():
    names = [kind.__name__ for kind in subclasses(MoeRuntimeError)]
    drawn = [line.split("─ ")[1].split()[0] for line in errors.__doc__.splitlines() if "─ " in line]
    assert sorted(drawn) == sorted(names)


def test_errors_cross_processes_with_their_fields():
    error = errors.ContextExceeded(prompt_tokens=3, max_tokens=5, limit=6, param="prompt")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.fields == error.fields
    assert copy.body() == error.body()
    assert error.body()["error"]["code"] == "context_length_exceeded"


def test_what_may_be_tried_again_says_when():
    for kind in subclasses(errors.ApiError):
        assert kind.retryable == (kind.status in (429, 503, 504))
        assert (kind.retry_after_s is not None) == (kind.status in (429, 503))
