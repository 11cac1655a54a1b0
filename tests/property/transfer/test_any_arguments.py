"""Any arguments for what moves bytes: a naive reading says what they mean, or that they are wrong.

What makes sense does exactly what it says. All else is one clear error, moves no byte, and leaves
an engine that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import BACKENDS, BOTH, engine_pair, new_engine, offer
from transfer import AccessRefused, Pages, PeerLost, RegionKey, TransferEngine, allocate
from transfer.priority import Priority

SIZE = 64
SOON_S = 60.0
ERRORS = (TypeError, ValueError, AccessRefused)

# What is handed over, and the integers that it stands for: one for all, a list, None for nonsense.
Meant = tuple[Any, int | list[int] | None]


def _array(values: list[int], dtype: str, how: str) -> Meant:
    array = np.array(values, dtype=dtype)
    if how == "strided":
        array = np.repeat(array, 2)[::2]
    elif how == "reversed":
        array = array[::-1].copy()[::-1]
    elif how == "frozen":
        array.flags.writeable = False
    return array, values


small = st.integers(-2, SIZE + 2)
inside = st.integers(0, SIZE // 2)
lists = st.lists(inside, max_size=4) | st.lists(small, max_size=4)
scalars: st.SearchStrategy[Meant] = st.one_of(
    inside.map(lambda n: (n, n)),
    small.map(lambda n: (n, n)),
    inside.map(lambda n: (np.int64(n), n)),
    inside.map(lambda n: (np.array(n, dtype=np.uint16), n)),
    st.sampled_from([2**62, 2**63 - 1, -(2**63) + 1]).map(lambda n: (n, n)),
)
arrays: st.SearchStrategy[Meant] = st.one_of(
    lists.map(lambda values: (values, values)),
    st.builds(_array, st.lists(inside, max_size=4), st.sampled_from(["i1", ">i4", "i8", "u8"]),
              st.sampled_from(["plain", "strided", "reversed", "frozen"])),
)  # fmt: skip
nonsense: st.SearchStrategy[Meant] = st.sampled_from([
    0.0, 1.5, math.nan, math.inf, True, False, None, "0", b"0", 1j, object(), {}, 2**63, -(2**70),
    [0.0], [True], [None], ["0"], [[0]], [[0], [1, 2]], [2**70], [math.nan], np.zeros((1, 1), int),
    np.zeros(1), np.zeros(1, bool), np.zeros(1, "M8[s]"), np.zeros(1, object), np.bool_(True),
    np.float32(1), np.array([2**63], np.uint64), torch.zeros(1),
]).map(lambda value: (value, None))  # fmt: skip
offsets = st.one_of(scalars, arrays, arrays, nonsense)


def meaning(ours: Meant, theirs: Meant, lengths: Meant) -> list[tuple[int, int, int]] | None:
    """Pieces that can be moved between two areas of `SIZE` bytes; None if it makes no sense."""
    columns = [ours[1], theirs[1], lengths[1]]
    if any(column is None for column in columns):
        return None
    counts = {len(column) for column in columns if isinstance(column, list)} - {1}
    if len(counts) > 1:
        return None
    count = counts.pop() if counts else 1
    spread = [[c] * count if isinstance(c, int) else c * count if len(c) == 1 else c
              for c in columns]  # type: ignore[arg-type] # fmt: skip
    pieces = list(zip(*spread, strict=True))
    if any(n < 0 for _, _, n in pieces):
        return None
    pieces = [piece for piece in pieces if piece[2]]
    if any(not 0 <= at <= SIZE - n for s, t, n in pieces for at in (s, t)):
        return None
    return pieces


class Scene:
    def __init__(self, a: TransferEngine, b: TransferEngine) -> None:
        self.a, self.b = a, b
        self.mine = a.register(allocate(SIZE))
        self.theirs = [b.register(allocate(SIZE)), b.register(torch.zeros(SIZE, dtype=torch.uint8))]
        self.keys = [offer(b, region, a) for region in self.theirs]
        self.tag = self.moved = 0

    def fill(self) -> None:
        """Every byte of every side is another one."""
        for i, region in enumerate((self.mine, *self.theirs)):
            region.tensor.copy_(torch.arange(SIZE, dtype=torch.uint8) + i * SIZE)

    def check_usable(self) -> None:
        self.tag += 1
        self.a.write(self.b.name, self.mine, self.keys[0], 0, 0, 8, immediate=self.tag).wait(SOON_S)
        self.b.expect({(self.a.name, self.tag): 1}, timeout_s=SOON_S)
        assert torch.equal(self.mine.tensor[:8], self.theirs[0].tensor[:8])


@pytest.fixture(scope="module", params=BACKENDS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with engine_pair(request.param) as (a, b):
        yield Scene(a, b)


def expect(
    scene: Scene, which: int, pieces: list[tuple[int, int, int]] | None, call: Callable[[], Any],
    *, writes: bool,
) -> None:  # fmt: skip
    """`pieces`: (source, target, length). Where targets overlap any of them may win."""
    scene.fill()
    source, target = scene.mine.array, scene.theirs[which].array
    if not writes:
        source, target = target, source
    allowed = [{int(byte)} for byte in target]
    for s, t, n in pieces or []:
        for i in range(n):
            first = len(allowed[t + i]) == 1 and int(target[t + i]) in allowed[t + i]
            allowed[t + i] = (set() if first else allowed[t + i]) | {int(source[s + i])}
    if pieces is None:
        with pytest.raises(ERRORS) as caught:
            call().wait(SOON_S)
        assert 0 < len(str(caught.value)) < 500
    else:
        call().wait(SOON_S)
        scene.moved += bool(pieces)
    assert all(int(byte) in allowed[i] for i, byte in enumerate(target))
    scene.check_usable()


many = settings(max_examples=150)


def test_any_offsets(scene: Scene) -> None:
    @given(offsets, offsets, offsets, st.integers(0, 1), st.sampled_from(
        ["write", "read", "prepare_write", "prepare_read"]))  # fmt: skip
    @many
    def check(ours: Meant, theirs: Meant, lengths: Meant, which: int, how: str) -> None:
        writes = how.endswith("write")
        pieces = meaning(ours, theirs, lengths)
        if pieces is not None and not writes:
            pieces = [(t, s, n) for s, t, n in pieces]
        method = getattr(scene.a, how)
        arguments = (scene.b.name, scene.mine, scene.keys[which], ours[0], theirs[0], lengths[0])

        def call() -> Any:
            made = method(*arguments)
            return made.post() if how.startswith("prepare") else made

        expect(scene, which, pieces, call, writes=writes)

    before = scene.moved
    check()
    assert scene.moved > before + 5, "not everything was nonsense"


def mostly(sane: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> Any:
    """Several arguments that all make sense would be rare otherwise."""
    return st.integers(0, 9).flatmap(lambda die: other if die == 9 else sane)


def alone(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Meant]:
    return numbers.map(lambda n: (n, n))


zero_or_less = st.sampled_from([0, -1, 2**43]).map(lambda n: (n, None))
strides = mostly(alone(st.sampled_from([1, 4, 8])), nonsense | zero_or_less)


def meant_pages(numbers: Meant, stride: Meant, offset: Meant) -> list[int] | None:
    values = [numbers[1]] if isinstance(numbers[1], int) else numbers[1]
    if values is None or not isinstance(stride[1], int) or not isinstance(offset[1], int):
        return None
    if any(value < 0 for value in values) or offset[1] < 0:
        return None
    return [offset[1] + value * stride[1] for value in values]


page_numbers = st.one_of(
    st.lists(st.integers(0, 6), max_size=4).map(lambda values: (values, values)),
    st.builds(_array, st.lists(st.integers(0, 6), max_size=4), st.sampled_from(["u1", "i8"]),
              st.sampled_from(["plain", "strided", "frozen"])), arrays, nonsense,
)  # fmt: skip
# Of an array as an offset, a stride or a size nothing is said.
sizes = mostly(alone(st.integers(0, 4)), alone(inside) | nonsense)
same_length = (
    st.integers(0, 4)
    .flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 6), min_size=n, max_size=n)] * 2))
    .map(lambda pair: tuple((values, values) for values in pair))
)
both_numbers = mostly(same_length, st.tuples(page_numbers, page_numbers))


def test_any_pages(scene: Scene) -> None:
    @given(both_numbers, strides, strides, sizes, sizes, st.booleans())
    @many
    def check(
        numbers: tuple[Meant, Meant], our_stride: Meant, stride: Meant, offset: Meant, size: Meant,
        writes: bool,
    ) -> None:  # fmt: skip
        ours, theirs = numbers
        mine, other = meant_pages(ours, our_stride, (0, 0)), meant_pages(theirs, stride, offset)
        pieces = None
        if mine is not None and other is not None and isinstance(size[1], int):
            fits = len(mine) == len(other) and 0 <= size[1] <= min(our_stride[1], stride[1])
            pieces = meaning(([], mine), ([], other), (0, size[1])) if fits else None
        if pieces is not None and not writes:
            pieces = [(t, s, n) for s, t, n in pieces]
        method = scene.a.write_pages if writes else scene.a.read_pages

        def call() -> Any:
            our_pages = Pages(numbers=ours[0], stride=our_stride[0])
            their_pages = Pages(numbers=theirs[0], stride=stride[0], offset=offset[0])
            return method(scene.b.name, scene.mine, scene.keys[0], our_pages, their_pages, size[0])

        expect(scene, 0, pieces, call, writes=writes)

    before = scene.moved
    check()
    assert scene.moved > before + 5, "not everything was nonsense"


IMMEDIATES = [-1, 2**32, 1.0, "1", True, b"1", math.nan]
TIMEOUTS = ["1", math.nan, math.inf, 1e300, True, [1]]
PRIORITIES = [0, 5, True, "ACTIVATIONS", [], object()]


@pytest.mark.parametrize("which", [0, 1])
def test_options_that_make_no_sense_move_nothing(scene: Scene, which: int) -> None:
    a, to = scene.a, (scene.b.name, scene.mine, scene.keys[which])
    page = Pages(numbers=[0], stride=8)
    writing, reading = (
        a.prepare_write(*to, 0, 0, 8),
        a.prepare_read(*to, 0, 0, 8),
    )
    calls: list[tuple[str, Callable[..., Any], list[Any], bool]] = [
        ("immediate", lambda **o: writing.post(**o), IMMEDIATES, True),
        ("timeout_s", lambda **o: writing.post(**o), TIMEOUTS, True),
        ("immediate", lambda **o: reading.post(**o), [0, 1, *IMMEDIATES], False),
        ("timeout_s", lambda **o: reading.post(**o), TIMEOUTS, False),
        ("priority", lambda **o: a.write(*to, 0, 0, 8, **o), PRIORITIES, True),
        ("priority", lambda **o: a.read(*to, 0, 0, 8, **o), PRIORITIES, False),
        ("priority", lambda **o: a.write(*to, [0], [0], 8, **o), PRIORITIES, True),
        ("priority", lambda **o: a.prepare_write(*to, 0, 0, 8, **o), PRIORITIES, True),
        ("immediate", lambda **o: a.write_pages(*to, page, page, 8, **o), IMMEDIATES, True),
        ("priority", lambda **o: a.write_pages(*to, page, page, 8, **o), PRIORITIES, True),
        ("timeout_s", lambda **o: a.read_pages(*to, page, page, 8, **o), TIMEOUTS, False),
    ]  # fmt: skip
    for option, call, values, writes in calls:
        for value in values:
            expect(scene, which, None, lambda c=call, o=option, v=value: c(**{o: v}), writes=writes)
    for priority in Priority:
        a.write(*to, 0, 0, 8, priority=priority).wait(SOON_S)


def test_keys_and_regions_of_others(scene: Scene) -> None:
    a, b, mine = scene.a, scene.b, scene.mine
    page = Pages(numbers=[0], stride=8)
    with new_engine() as c:
        to_c = RegionKey.decode(b.offer(scene.theirs[0], to=c.name, access=BOTH).encode())
        ours = a.offer(mine, to=b.name, access=BOTH)
        for key in (to_c, ours, None, b"key", mine, scene.keys[0].encode()):
            for call in (
                lambda k: a.write(b.name, mine, k, 0, 0, 8),
                lambda k: a.read(b.name, mine, k, 0, 0, 8),
                lambda k: a.write(b.name, mine, k, [0, 8], [0, 8], 8),
                lambda k: a.write_pages(b.name, mine, k, page, page, 8),
                lambda k: a.read_pages(b.name, mine, k, page, page, 8),
                lambda k: a.prepare_write(b.name, mine, k, 0, 0, 8).post(),
                lambda k: a.prepare_read(b.name, mine, k, 0, 0, 8).post(),
            ):
                expect(scene, 0, None, lambda f=call, k=key: f(k), writes=True)
        b.withdraw(to_c)
        a.withdraw(ours)
    for region in (None, mine.tensor, scene.keys[0], b"x"):
        for call in (
            lambda r: a.write(b.name, r, scene.keys[0], 0, 0, 8),
            lambda r: a.read(b.name, r, scene.keys[0], [0], 0, 8),
            lambda r: a.prepare_read(b.name, r, scene.keys[0], 0, 0, 8),
            lambda r: a.write_pages(b.name, r, scene.keys[0], page, page, 8),
        ):
            expect(scene, 0, None, lambda f=call, r=region: f(r), writes=True)
    for pages in (None, [0], 5, "x"):
        to = (b.name, mine, scene.keys[0])
        for method, order in ((a.write_pages, (pages, page)), (a.read_pages, (page, pages))):
            expect(scene, 0, None, lambda m=method, o=order, t=to: m(*t, *o, 8), writes=True)


def test_explain_and_disconnect_say_what_is_wrong(scene: Scene) -> None:
    for memory in (5, "x", b"", torch.zeros(4), object()):
        for name in (scene.a.name, scene.b.name):
            with pytest.raises(TypeError):
                scene.a.explain(name, memory)
    for reason in (None, 1, b"x", ["x"]):
        with pytest.raises(TypeError):
            scene.a.disconnect("somebody", reason=reason)
    scene.a.offer(scene.mine, to="somebody", access=BOTH)
    with pytest.raises(ValueError, match="itself"):
        scene.a.disconnect(scene.a.name, reason="x")
    scene.check_usable()


def test_prepared_transfers_after_their_key_and_peer_are_gone() -> None:
    for backend in BACKENDS:
        with engine_pair(backend) as (a, b):
            scene = Scene(a, b)
            makes = (a.prepare_write, a.prepare_read)
            posts = [make(b.name, scene.mine, k, 0, 0, 8) for k in scene.keys for make in makes]
            for post in posts:
                post.post().wait(SOON_S)
            for key in scene.keys:
                b.withdraw(key)
            b.notify(a.name, b"withdrawn")  # behind what tells a of it
            for post in posts[2:] if backend == "shared_memory" else posts:
                with pytest.raises(AccessRefused):
                    post.post().wait(SOON_S)
            a.disconnect(b.name, reason="enough")
            for post in posts:
                with pytest.raises(PeerLost):
                    post.post().wait(SOON_S)
