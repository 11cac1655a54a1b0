from __future__ import annotations

from moe_runtime.front.router import FENCED_MAX, PREFIXES_MAX, STRANGERS_MAX, Router
from moe_runtime.messages import Goodbye, Hello, Load, ViewCommitted


def hello(name, *, rank=0, context=512):
    return Hello(incarnation=name, rank=rank, epoch=0, max_context_tokens=context, kv_pages=8)


def view(epoch, *members):
    return ViewCommitted(incarnation="x", view=b"", members=list(members), epoch=epoch)


def group(*names):
    router = Router()
    for name in names:
        router.hello(hello(name), 0.0)
    router.view(view(1, *names))
    return router


def test_a_worker_needs_both_a_view_and_a_hello_in_any_order():
    router = Router()
    router.view(view(1, "a", "b"))
    assert router.choose([1], {}) is None
    router.hello(hello("a"), 0.0)
    router.hello(hello("c"), 0.0)
    assert router.routable() == ["a"]
    router.view(view(2, "a", "b", "c"))
    assert router.routable() == ["a", "c"]


def test_fewest_outstanding_tokens_win():
    router = group("a", "b", "c")
    assert router.choose([1], {"a": 5, "b": 3, "c": 4}) == "b"
    assert router.choose([1], {"a": 5, "b": 3}) == "c"
    assert router.choose([1], {}) == "a"


def test_a_known_prefix_only_breaks_ties():
    router = group("a", "b")
    prompt = list(range(64))
    assert router.choose(prompt, {"a": 1}) == "b"
    assert router.choose([*prompt, 99], {}) == "b"
    assert router.choose([*prompt[:32], 1, 2], {}) == "b"
    assert router.choose([99, *prompt], {}) == "a"
    assert router.choose(prompt, {"b": 1}) == "a"


def test_older_views_are_ignored():
    router = group("a", "b")
    assert router.view(view(1, "a")) == frozenset()
    assert router.view(view(3, "a")) == {"b"}
    assert router.view(view(2, "a", "b")) == frozenset()
    assert router.routable() == ["a"]


def test_a_former_member_cannot_come_back():
    router = group("a", "b")
    router.view(view(2, "a"))
    assert not router.hello(hello("b"), 1.0)
    load = Load(
        incarnation="b", running=0, waiting=0, free_pages=1, num_pages=1, epoch=1, counters={}
    )
    assert not router.load(load, 1.0)
    assert sorted(router.workers) == ["a"]


def test_goodbye_comes_before_the_view_that_follows_it():
    router = group("a", "b")
    assert router.goodbye(Goodbye(incarnation="b")) == {"b"}
    assert router.routable() == ["a"]


def test_an_unreachable_worker_waits_until_it_is_heard_of():
    router = group("a")
    router.unreachable("a")
    assert router.routable() == []
    router.heard("a", 2.0)
    assert router.routable() == ["a"]
    assert router.workers["a"].heard_at == 2.0


def test_the_context_is_what_every_worker_has():
    router = Router()
    assert router.max_context_tokens() is None
    router.hello(hello("a", context=100), 0.0)
    router.hello(hello("b", context=80), 0.0)
    assert router.max_context_tokens() == 80


def test_what_is_remembered_is_bounded():
    router = group("a")
    for start in range(0, 40 * PREFIXES_MAX, 16 * 256):
        router.choose(list(range(start, start + 16 * 256)), {})
    assert len(router.workers["a"].prefixes) == PREFIXES_MAX
    for number in range(STRANGERS_MAX + 50):
        router.hello(hello(f"s{number}"), 0.0)
    assert len(router.workers) == STRANGERS_MAX + 1
    for number in range(FENCED_MAX + 50):
        router.goodbye(Goodbye(incarnation=f"s{number}"))
    assert router.routable() == ["a"]
