"""What clients say of blocks: their tokens, and the block before each. Told with `BlockStored`.

Describe ──▶ awaited ── the block is stored ──▶ present ── gone from its last medium ──▶ forgotten
(bounded: what never comes gives way)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

AWAITED_MAX: Final = 1 << 16  # described blocks that are not there yet
AWAITED_BYTES_MAX: Final = 32 << 20  # of their tokens
TOKEN_TYPE: Final = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Link:
    """One block's place in its chain.

    Attributes:
        parent: Key of the block before it; None of the first.
        tokens: Its tokens, 4 bytes each, little-endian.
    """

    parent: bytes | None
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        """How many tokens the block has."""
        return len(self.tokens) // TOKEN_TYPE.itemsize


Links = Mapping[bytes, Link]


def link_of(token_ids: Sequence[int], parent: bytes | None) -> Link:
    """Return the link of a block with these tokens, each in [0, 2**32)."""
    return Link(parent, np.asarray(token_ids, dtype=TOKEN_TYPE).tobytes())


class Chains:
    """Links of blocks that are there, or expected. Not thread-safe."""

    def __init__(self) -> None:
        self._awaited: OrderedDict[bytes, Link] = OrderedDict()
        self._awaited_bytes = 0
        self._present: dict[bytes, Link] = {}
        self._media: dict[bytes, int] = {}  # of those that are present: in how many they are

    def describe(self, keys: Sequence[bytes], links: Iterable[Link]) -> None:
        """Remember what blocks are that will be stored soon."""
        for key, link in zip(keys, links, strict=True):
            self._await_no_more(key)
            self._awaited[key] = link
            self._awaited_bytes += len(link.tokens)
        while len(self._awaited) > AWAITED_MAX or self._awaited_bytes > AWAITED_BYTES_MAX:
            self._await_no_more(next(iter(self._awaited)))

    def stored(self, keys: Sequence[bytes]) -> Links:
        """Take note of blocks that are in a further medium; return the links of those known."""
        if not self._awaited and not self._present:
            return {}
        found: dict[bytes, Link] = {}
        for key in keys:
            link = self._await_no_more(key) or self._present.get(key)
            if link is not None:
                found[key] = self._present[key] = link
                self._media[key] = self._media.get(key, 0) + 1
        return found

    def removed(self, keys: Sequence[bytes]) -> None:
        """Forget blocks that are in no medium any more."""
        if self._present:
            for key in keys:
                if key in self._present:
                    self._media[key] -= 1
                    if self._media[key] <= 0:
                        del self._media[key], self._present[key]

    def restate(self) -> None:
        """What is there will be stored anew."""
        self._media = dict.fromkeys(self._present, 0)

    def _await_no_more(self, key: bytes) -> Link | None:
        link = self._awaited.pop(key, None)
        if link is not None:
            self._awaited_bytes -= len(link.tokens)
        return link


def parents_first(keys: Iterable[bytes], links: Links) -> list[bytes]:
    """Return keys in an order in which each comes behind its parent, chains in one piece."""
    if not links:
        return list(keys)
    waiting = dict.fromkeys(keys)
    children: dict[bytes, list[bytes]] = {}
    stack: list[bytes] = []
    for key in waiting:
        link = links.get(key)
        if link is None or link.parent is None or link.parent not in waiting:
            stack.append(key)
        else:
            children.setdefault(link.parent, []).append(key)
    stack.reverse()
    ordered: list[bytes] = []
    while stack:
        key = stack.pop()
        ordered.append(key)
        del waiting[key]
        stack += reversed(children.get(key, ()))
    return ordered + list(waiting)  # these follow one another in circles: somebody told nonsense


def runs_of(keys: Iterable[bytes], links: Links) -> Iterator[list[bytes]]:
    """Yield parts of chains, each key behind its parent; what has no link all in one.

    All of a part have equally many tokens.
    """
    ordered = parents_first(keys, links)
    alone = [key for key in ordered if key not in links]
    if alone:
        yield alone
    run: list[bytes] = []
    for key in ordered:
        link = links.get(key)
        if link is None:
            continue
        if run and (link.parent != run[-1] or link.num_tokens != links[run[-1]].num_tokens):
            yield run
            run = []
        run.append(key)
    if run:
        yield run


def tokens_of(keys: Iterable[bytes], links: Links) -> list[int]:
    """Return the tokens of blocks, one after the other."""
    joined = b"".join(links[key].tokens for key in keys if key in links)
    tokens: list[int] = np.frombuffer(joined, dtype=TOKEN_TYPE).tolist()
    return tokens
