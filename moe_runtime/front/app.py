"""The HTTP routes. Every error, known or not, reaches the client as an OpenAI error object."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from moe_runtime import __version__
from moe_runtime.front.errors import ApiError, ClientGone, ModelNotFound, Unavailable, error_body
from moe_runtime.front.http_exchange import (
    EventStream,
    error_response,
    json_response,
    read_body,
    whole_answer,
)
from moe_runtime.front.openai_schema import ChatRequest, CompletionRequest, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from moe_runtime.front.metrics import Metrics
    from moe_runtime.front.openai_schema import SamplingRequest
    from moe_runtime.front.service import OpenAnswer, Service

logger = logging.getLogger(__name__)

#: what other servers log when the client hung up; nobody receives it
CLIENT_CLOSED_REQUEST = 499


def create_app(
    service: Service,
    metrics: Metrics,
    *,
    unhealthy_reason: Callable[[], str | None],
    status: Callable[[], dict[str, Any]],
) -> FastAPI:
    """Return the application.

    Args:
        service: Opens answers.
        metrics: Exposed at /metrics.
        unhealthy_reason: Why generation does not work, or None.
        status: The content of /status.
    """
    app = FastAPI(
        title="moe-runtime", version=__version__, openapi_url=None, redirect_slashes=False
    )
    _add_error_handlers(app)
    _add_openai_routes(app, service)
    _add_operator_routes(app, metrics, unhealthy_reason, status)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        query = parse(CompletionRequest, await read_body(request))
        return await _respond(request, query, await service.complete(query))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        query = parse(ChatRequest, await read_body(request))
        return await _respond(request, query, await service.chat(query))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model_name:
            raise ModelNotFound(model=name, served=service.model_name)
        return json_response(_model(service))


def _add_operator_routes(
    app: FastAPI,
    metrics: Metrics,
    unhealthy_reason: Callable[[], str | None],
    status: Callable[[], dict[str, Any]],
) -> None:
    @app.get("/health")
    async def health() -> Response:
        reason = unhealthy_reason()
        if reason is not None:
            raise Unavailable(reason=reason)
        return json_response({"status": "ok"})

    @app.get("/live")
    async def live() -> Response:
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/status")
    async def show_status() -> Response:
        return json_response(status())

    @app.get("/metrics")
    async def expose_metrics() -> Response:
        return Response(metrics.expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _respond(request: Request, query: SamplingRequest, opened: OpenAnswer) -> Response:
    if query.stream:
        return EventStream(opened, include_usage=query.include_usage)
    return await whole_answer(request, opened)


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "moe-runtime",
        "max_model_len": service.max_context_tokens,
    }


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = error_body(message, kind="invalid_request_error", code=None)
        return json_response(body, status=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return json_response(error_body("internal error", kind="server_error"), status=500)
