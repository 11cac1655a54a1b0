"""The front as its owner sees it: start, drain, stop, and hooks."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from elastic import View
from elastic.errors import RecordInvalid
from moe_runtime.front.app import create_app
from moe_runtime.front.metrics import Metrics
from moe_runtime.front.relay import Relay
from moe_runtime.front.service import Service
from moe_runtime.front.status_report import status_report
from moe_runtime.front.tokenizer import Tokenizer, read_json
from moe_runtime.front.worker_link import WorkerLink
from moe_runtime.messages import Drain, Stop, ViewCommitted

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from configs.schema import RuntimeConfig

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_CONTEXT_TOKENS_UNKNOWN = 1 << 31


class Front:
    """HTTP application and control link of one front. Belongs to one event loop.

    It does not listen for HTTP itself: give `app` to `HttpServer` or to any ASGI server. It neither
    hosts the membership store nor the store master.

    Args:
        config: The whole configuration.
        secret: The cluster secret.
        on_view: Called in the event loop with each newly committed view.

    Raises:
        TokenizerNotLoaded: The checkpoint's tokenizer is missing or not understood.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        secret: bytes,
        on_view: Callable[[View], None] | None = None,
    ) -> None:
        self.config = config
        self.model_name = config.model.served_name or config.model.path.name
        self.view: View | None = None
        self._on_view = on_view
        self._ticking: asyncio.Task[None] | None = None
        metrics = Metrics(self.model_name)
        self._link = WorkerLink(
            secret,
            host=config.transfer.host,
            on_message=lambda message: self.relay.receive(message),
            on_undelivered=lambda name, message: self.relay.undelivered(name, message),
        )
        self.relay = Relay(
            max_open_requests=config.front.max_open_requests,
            request_timeout_s=config.front.request_timeout_s,
            send=self._link.send,
            on_view=self._adopted,
            metrics=metrics,
            clock=time.monotonic,
        )
        metrics.watch(self.relay.journal, self.relay.router)
        service = Service(
            model_name=self.model_name,
            tokenizer=Tokenizer.load(config.model.path),
            relay=self.relay,
            context_tokens=_context_tokens(config),
        )
        self.app: FastAPI = create_app(
            service, metrics, unhealthy_reason=self.unhealthy_reason, status=self.status
        )

    @property
    def control_address(self) -> str:
        """Where workers connect: "127.0.0.1:43210"; set by `start`."""
        return self._link.address

    async def start(self) -> None:
        """Open the control link."""
        self._link.open()
        self._ticking = asyncio.create_task(self._tick(), name="front-tick")

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for the open ones; what is late is failed with 503.

        Returns:
            Whether all of them ended within `timeout_s` (default: `front.drain_timeout_s`).
        """
        self.relay.draining = True
        limit_s = self.config.front.drain_timeout_s if timeout_s is None else timeout_s
        logger.info("draining: %d open requests", len(self.relay.journal))
        if await self.relay.wait_empty(limit_s):
            return True
        logger.warning("%d requests did not end within %.1f s", len(self.relay.journal), limit_s)
        self.relay.fail_open("the server is shutting down")
        return False

    async def stop(self) -> None:
        """Close the control link. Requests still open are no longer served."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
            self._ticking = None
        await self._link.close()

    def stop_workers(self) -> None:
        """Tell every worker to end now."""
        for incarnation in self.relay.router.workers:
            self._link.send(incarnation, Stop())

    def drain_worker(self, incarnation: str) -> None:
        """Tell one worker to leave the group in a planned way."""
        self._link.send(incarnation, Drain())

    def unhealthy_reason(self) -> str | None:
        """Why generation does not work at present; None if it does."""
        failure = self._link.failure()
        if failure is None and self._ticking is not None and self._ticking.done():
            failure = self._ticking.exception()
        if failure is not None:
            return f"the front itself has failed: {type(failure).__name__}"
        return self.relay.unhealthy_reason()

    def status(self) -> dict[str, Any]:
        """View, members with their load, and open requests."""
        report = status_report(self.relay, self.view)
        reason = self.unhealthy_reason()
        return {
            "model": self.model_name,
            "healthy": reason is None,
            "unhealthy_reason": reason,
            **report,
        }

    def _adopted(self, message: ViewCommitted) -> None:
        try:
            self.view = View.decode(message.view)
        except RecordInvalid as error:
            # The members are known from the message; only /status shows less.
            logger.error("view %d is not understood: %s", message.epoch, error)  # noqa: TRY400
            return
        if self._on_view is not None:
            self._on_view(self.view)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.relay.tick()


def _context_tokens(config: RuntimeConfig) -> int:
    """The context until a worker tells its own: that of the model, capped by the pages."""
    pages = config.scheduler.num_pages * config.scheduler.page_tokens
    model = read_json(config.model.path / "config.json").get("max_position_embeddings")
    wanted = config.scheduler.max_context_tokens or model or _CONTEXT_TOKENS_UNKNOWN
    return min(pages, int(wanted))
