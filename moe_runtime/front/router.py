"""Which worker takes a request. Pure: it is told what workers say, and answers.

A worker is routable if the current view names it, it said hello, it has not said goodbye, and its
link works. Among those the one with the fewest outstanding tokens is chosen; of equals the one that
saw the longest prefix of the prompt last; of those the lowest incarnation, so that a choice can
be repeated.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_runtime.messages import Goodbye, Hello, Load, ViewCommitted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PREFIX_TOKENS = 16
#: prefixes remembered per worker; the oldest are forgotten
PREFIXES_MAX = 4096
#: past members remembered, so that what they still say is ignored
FENCED_MAX = 4096
#: workers that said hello and wait for a view to name them
STRANGERS_MAX = 1024


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """What is known of one worker.

    Attributes:
        heard_at: When it last said anything.
        reachable: Whether the last message to it could be sent; any message from it restores it.
        prefixes: Chained hashes of prefixes it was given, oldest first.
    """

    hello: Hello
    heard_at: float
    load: Load | None = None
    reachable: bool = True
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Router:
    """All workers, by incarnation. Not thread-safe; `now` is a monotonic time in seconds."""

    def __init__(self) -> None:
        self.epoch = 0
        self.members: frozenset[str] = frozenset()
        self.workers: dict[str, WorkerState] = {}
        self._fenced: OrderedDict[str, None] = OrderedDict()

    def hello(self, message: Hello, now: float) -> bool:
        """A worker introduced itself; False if it was a member before and is no more."""
        if message.incarnation in self._fenced:
            return False
        strangers = [name for name in self.workers if name not in self.members]
        for name in strangers[: max(0, len(strangers) + 1 - STRANGERS_MAX)]:
            del self.workers[name]
        self.workers[message.incarnation] = WorkerState(hello=message, heard_at=now)
        return True

    def load(self, message: Load, now: float) -> bool:
        """A worker said how busy it is; False if it is not known."""
        worker = self.workers.get(message.incarnation)
        if worker is None:
            return False
        worker.load = message
        self.heard(message.incarnation, now)
        return True

    def heard(self, incarnation: str, now: float) -> None:
        """A worker said anything at all."""
        worker = self.workers.get(incarnation)
        if worker is not None:
            worker.heard_at = now
            worker.reachable = True

    def view(self, message: ViewCommitted) -> frozenset[str]:
        """A view was committed; older ones than the current are ignored.

        Returns:
            The members that it no longer names.
        """
        if message.epoch <= self.epoch:
            return frozenset()
        members = frozenset(message.members)
        lost = self.members - members
        self.epoch, self.members = message.epoch, members
        self._fence(lost)
        return lost

    def goodbye(self, message: Goodbye) -> frozenset[str]:
        """A worker ends; returns it as lost."""
        self._fence((message.incarnation,))
        return frozenset((message.incarnation,))

    def unreachable(self, incarnation: str) -> None:
        """A message could not be sent to this worker."""
        worker = self.workers.get(incarnation)
        if worker is not None:
            worker.reachable = False

    def routable(self) -> list[str]:
        """Workers that can take a request now, sorted."""
        return sorted(
            name
            for name, worker in self.workers.items()
            if name in self.members and worker.reachable
        )

    def max_context_tokens(self) -> int | None:
        """The context that every known worker has; None before the first hello."""
        return min((w.hello.max_context_tokens for w in self.workers.values()), default=None)

    def choose(self, prompt_ids: Sequence[int], outstanding: Mapping[str, int]) -> str | None:
        """Return the worker for a prompt, or None if there is none at present.

        Args:
            prompt_ids: The prompt.
            outstanding: Tokens still to be computed per incarnation; absent means 0.
        """
        candidates = self.routable()
        if not candidates:
            return None
        prefixes = _prefix_hashes(prompt_ids)
        chosen = min(
            candidates,
            key=lambda name: (outstanding.get(name, 0), -self._known(name, prefixes), name),
        )
        self._remember(chosen, prefixes)
        return chosen

    def _known(self, name: str, prefixes: Sequence[int]) -> int:
        seen = self.workers[name].prefixes
        return next((i for i, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))

    def _remember(self, name: str, prefixes: Sequence[int]) -> None:
        seen = self.workers[name].prefixes
        for prefix in prefixes:
            seen[prefix] = None
            seen.move_to_end(prefix)
        while len(seen) > PREFIXES_MAX:
            seen.popitem(last=False)

    def _fence(self, incarnations: Iterable[str]) -> None:
        for incarnation in incarnations:
            self.workers.pop(incarnation, None)
            self._fenced[incarnation] = None
        while len(self._fenced) > FENCED_MAX:
            self._fenced.popitem(last=False)


def _prefix_hashes(prompt_ids: Sequence[int]) -> list[int]:
    """Chained hashes of the prompt's whole runs of `PREFIX_TOKENS`."""
    hashes: list[int] = []
    parent = 0
    for end in range(PREFIX_TOKENS, len(prompt_ids) + 1, PREFIX_TOKENS):
        parent = hash((parent, tuple(prompt_ids[end - PREFIX_TOKENS : end])))
        hashes.append(parent)
    return hashes
