"""What `Store.view` returns: opens a view at the start of a `with` block, and ends it after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.client.view import View

if TYPE_CHECKING:
    from types import TracebackType

ViewT = TypeVar("ViewT", bound=View)


class Viewing(Generic[ViewT]):
    """A view that is open for one `with` block; what is not there gives None. Not thread-safe.

    At the end of the block the view is checked, see `View.check`, unless an error is on its way.

    Args:
        begin: Opens it.
    """

    __slots__ = ("_begin", "_view")

    def __init__(self, begin: Callable[[], ViewT | None]) -> None:
        self._begin = begin
        self._view: ViewT | None = None

    def __enter__(self) -> ViewT | None:
        self._view = self._begin()
        return self._view

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.__exit__(kind, error, trace)


class AsyncViewing(Generic[ViewT]):
    """As `Viewing`, of an `async with` block.

    Args:
        begin: Opens it.
    """

    __slots__ = ("_begin", "_view")

    def __init__(self, begin: Callable[[], Awaitable[ViewT | None]]) -> None:
        self._begin = begin
        self._view: ViewT | None = None

    async def __aenter__(self) -> ViewT | None:
        self._view = await self._begin()
        return self._view

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.__exit__(kind, error, trace)
