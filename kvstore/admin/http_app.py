"""The administration service's HTTP routes. JSON in and out; docs/kvstore-admin.md lists them.

    GET  /live, /ready                          nobody need be anybody
    GET  /metrics                               the token, unless `open_metrics`
    all of /v1/store/...                        Authorization: Bearer TOKEN

Errors are `{"error": {"problem": ..., "kind": ...}}`: 400 nonsense, 401 no or a wrong token, 404
nothing of that name, 409 not now, 413 too long, 503 a master is away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvstore.admin.drains import ASK_S, asked_again, is_over
from kvstore.admin.reports import VerifyOptions, VerifyReport, VerifyState
from kvstore.admin.tokens import authorizes
from kvstore.errors import (
    AdminRefused,
    DrainIncomplete,
    KVStoreError,
    MasterRefused,
    MasterUnavailable,
)
from kvstore.wire.messages import RefusalReason

if TYPE_CHECKING:
    from kvstore.admin.store_admin import StoreAdmin
    from kvstore.admin.verify_job import VerifyJob
    from kvstore.admin.verify_jobs import VerifyJobs

logger = logging.getLogger(__name__)

PREFIX: Final = "/v1/store"
BODY_BYTES_MAX: Final = 1 << 16
BODY_S: Final = 10.0
WAIT_S_MAX: Final = 30.0
LOOK_S: Final = 0.1  # from one look at a verification that is waited for to the next
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class RebalanceOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/store/rebalance."""

    nbytes_max: int


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/store/drains/NODE: one copy elsewhere is enough; false says nothing new.

    `again`: begin nothing anew that somebody cancelled.
    """

    fewer_copies: bool = False
    again: bool = False


class QuotaOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of PUT /v1/store/tenants/NAME/quota; null: no limit."""

    nbytes: int | None


def create_app(
    admin: StoreAdmin,
    jobs: VerifyJobs,
    registry: CollectorRegistry,
    *,
    token: str,
    open_metrics: bool,
) -> FastAPI:
    """Return the application.

    Args:
        admin: Asks the masters; its calls run in threads.
        jobs: Verifications.
        registry: What /metrics tells.
        token: Who has it is an administrator.
        open_metrics: Tell /metrics to others too.
    """
    app = FastAPI(title="kvstore", openapi_url=None, redirect_slashes=False)
    _add_error_handlers(app)
    _add_token_check(app, token, open_metrics=open_metrics)
    _add_probes(app, admin, registry)
    _add_questions(app, admin)
    _add_orders(app, admin)
    _add_verifications(app, jobs)
    return app


def _add_token_check(app: FastAPI, token: str, *, open_metrics: bool) -> None:
    open_paths = {"/live", "/ready"} | ({"/metrics"} if open_metrics else set())

    @app.middleware("http")
    async def check(
        request: Request, forward: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        # Before the routing, so that nobody learns which paths there are.
        if request.url.path in open_paths or authorizes(
            request.headers.get("authorization"), token
        ):
            return await forward(request)
        given = "Authorization" in request.headers
        problem = (
            "not the administrators' token" if given else "this needs the administrators' token"
        )
        return _error(401, "unauthorized", problem)


def _add_probes(app: FastAPI, admin: StoreAdmin, registry: CollectorRegistry) -> None:
    @app.get("/live")
    async def live() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        report = await asyncio.to_thread(admin.status)
        away = sum(master.problem is not None for master in report.masters)
        body = {"ready": report.ready, "masters_away": away, "segments": len(report.segments)}
        return _json(body, 200 if report.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_questions(app: FastAPI, admin: StoreAdmin) -> None:
    @app.get(f"{PREFIX}/status")
    async def status(request: Request) -> Response:
        _query(request)
        return _json(await asyncio.to_thread(admin.status))

    @app.get(f"{PREFIX}/blocks")
    async def blocks(request: Request) -> Response:
        given = _query(request, "after", "limit", "tenant", "group")
        page = await asyncio.to_thread(
            admin.blocks,
            after=given.get("after", ""),
            limit=_integer(given, "limit", 1000),
            tenant=given.get("tenant"),
            group=given.get("group"),
        )
        return _json(page)

    @app.get(f"{PREFIX}/tenants")
    async def tenants(request: Request) -> Response:
        _query(request)
        return _json(await asyncio.to_thread(admin.tenants))

    @app.get(f"{PREFIX}/writers")
    async def writers(request: Request) -> Response:
        _query(request)
        return _json(await asyncio.to_thread(admin.writers))


def _add_orders(app: FastAPI, admin: StoreAdmin) -> None:
    @app.post(f"{PREFIX}/drains/{{node:path}}")
    async def drain(node: str, request: Request) -> Response:
        wait_s = _seconds(_query(request, "wait_s"), "wait_s")
        order = await _read(request, DrainOrder)
        deadline_s = time.monotonic() + wait_s
        fewer = order.fewer_copies
        report = await asyncio.to_thread(admin.drain, node, fewer_copies=fewer, again=order.again)
        while not is_over(report) and (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.sleep(min(ASK_S, left_s))
            report = await asyncio.to_thread(asked_again, admin, report, fewer_copies=fewer)
        return _json(report)

    @app.delete(f"{PREFIX}/drains/{{node:path}}")
    async def cancel_drain(node: str) -> Response:
        return _json(await asyncio.to_thread(admin.drain, node, cancel=True))

    @app.post(f"{PREFIX}/writers/{{writer:path}}/dead")
    async def confirm_dead(writer: str) -> Response:
        await asyncio.to_thread(admin.confirm_dead, writer)
        return _json({"writer": writer})

    @app.post(f"{PREFIX}/rebalance")
    async def rebalance(request: Request) -> Response:
        order = await _read(request, RebalanceOrder)
        return _json(await asyncio.to_thread(admin.rebalance, order.nbytes_max))

    @app.put(f"{PREFIX}/tenants/{{tenant:path}}/quota")
    async def set_quota(tenant: str, request: Request) -> Response:
        order = await _read(request, QuotaOrder)
        await asyncio.to_thread(admin.set_quota, tenant, order.nbytes)
        return _json({"tenant": tenant, "nbytes": order.nbytes})


def _add_verifications(app: FastAPI, jobs: VerifyJobs) -> None:
    @app.post(f"{PREFIX}/verifications")
    async def verify(request: Request) -> Response:
        options = await _read(request, VerifyOptions)
        if not 0.0 < options.share <= 1.0:
            raise HTTPException(400, f"share must be above 0 and at most 1, not {options.share}")
        job = await asyncio.to_thread(jobs.start, options)
        return _json({"id": job.job_id}, 202)

    @app.get(f"{PREFIX}/verifications/{{job_id}}")
    async def progress(job_id: str, request: Request) -> Response:
        wait_s = _seconds(_query(request, "wait_s"), "wait_s")
        job = jobs.find(job_id)
        return _json(await _ended(job, wait_s))

    @app.delete(f"{PREFIX}/verifications/{{job_id}}")
    async def cancel(job_id: str) -> Response:
        job = jobs.find(job_id)
        job.cancel()
        return _json(await _ended(job, WAIT_S_MAX))


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        problem = str(error.detail)
        if error.status_code == 404 and problem == HTTPStatus.NOT_FOUND.phrase:
            problem = f"there is no {request.url.path} here"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            problem = f"{request.url.path} takes {allowed}, not {request.method}"
        return _error(error.status_code, "http", problem, error.headers)

    @app.exception_handler(ValueError)
    async def nonsense(request: Request, error: ValueError) -> Response:
        return _error(400, "invalid", str(error))

    @app.exception_handler(MasterRefused)
    async def refused(request: Request, error: MasterRefused) -> Response:
        unknown = {RefusalReason.UNKNOWN_NODE, RefusalReason.UNKNOWN_TENANT}
        return _error(404 if error.reason in unknown else 400, error.reason, error.problem)

    @app.exception_handler(DrainIncomplete)
    async def node_went(request: Request, error: DrainIncomplete) -> Response:
        return _error(404, "node_left", str(error))

    @app.exception_handler(MasterUnavailable)
    async def unavailable(request: Request, error: MasterUnavailable) -> Response:
        return _error(503, "master_unavailable", str(error))

    @app.exception_handler(AdminRefused)
    async def admin_refused(request: Request, error: AdminRefused) -> Response:
        return _error(error.status, "refused", error.problem)

    @app.exception_handler(KVStoreError)
    async def store_error(request: Request, error: KVStoreError) -> Response:
        return _error(503 if error.retryable else 500, type(error).__name__, str(error))

    @app.exception_handler(ClientDisconnect)
    async def hung_up(request: Request, error: ClientDisconnect) -> Response:
        return _error(400, "hung_up", "the body did not come to its end")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _error(500, "internal", "internal error")


async def _read(request: Request, kind: type[BodyT]) -> BodyT:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise HTTPException(413, f"a body has at most {BODY_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not come within {BODY_S:g} s") from error
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=kind)  # none: all by default
    except msgspec.MsgspecError as error:
        raise HTTPException(400, f"body: {error}") from error


async def _ended(job: VerifyJob, wait_s: float) -> VerifyReport:
    """Wait as `VerifyJob.wait`, in no thread: many may wait, and nobody is kept from asking."""
    deadline_s = time.monotonic() + wait_s
    while (report := job.report()).state is VerifyState.RUNNING:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        await asyncio.sleep(min(LOOK_S, left_s))
    return report


def _query(request: Request, *names: str) -> dict[str, str]:
    unknown = sorted(set(request.query_params) - set(names))
    if unknown:
        raise HTTPException(400, f"unknown parameters: {', '.join(unknown)}")
    return dict(request.query_params)


def _integer(given: dict[str, str], name: str, default: int) -> int:
    try:
        return int(given.get(name, default))
    except ValueError as error:
        raise HTTPException(400, f"{name} is not an integer: {given[name]!r}") from error


def _seconds(given: dict[str, str], name: str) -> float:
    try:
        seconds = float(given.get(name, 0.0))
    except ValueError as error:
        raise HTTPException(400, f"{name} is not a number: {given[name]!r}") from error
    if not 0.0 <= seconds <= WAIT_S_MAX:
        raise HTTPException(400, f"{name} must be between 0 and {WAIT_S_MAX:g}")
    return seconds


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _error(
    status: int, kind: str, problem: str, headers: Mapping[str, str] | None = None
) -> Response:
    response = _json({"error": {"kind": kind, "problem": problem}}, status)
    response.headers.update(headers or {})
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
