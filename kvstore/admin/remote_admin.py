"""An administrator at the other end of HTTP: the calls of `StoreAdmin`, and verifications."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from kvstore.admin.reports import (
    BlockPage,
    DrainReport,
    PoolReport,
    RebalanceReport,
    TenantPage,
    VerifyOptions,
    VerifyReport,
    WriterPage,
)
from kvstore.errors import AdminRefused, AdminUnavailable

BodyT = TypeVar("BodyT")
PREFIX: Final = "/v1/store"
WAIT_S: Final = 2.0


class _Problem(msgspec.Struct):
    kind: str
    problem: str


class _ErrorBody(msgspec.Struct):
    error: _Problem


class _JobBody(msgspec.Struct):
    id: str


class RemoteAdmin:
    """Speaks to an `AdminServer`. Belongs to one thread.

    Args:
        url: Of the service.
        token: The administrators'.
        authority: PEM file of the authority that signed the service's certificate; default: those
            of this machine.
        timeout_s: Deadline of one request.

    Every call raises AdminRefused (the service said no) or AdminUnavailable (it said nothing
    usable; retryable).
    """

    def __init__(
        self, url: str, *, token: str, authority: Path | None = None, timeout_s: float = 30.0
    ) -> None:
        self._url = url.rstrip("/")
        verify: bool | ssl.SSLContext = True
        if authority is not None:
            try:
                verify = ssl.create_default_context(cafile=str(authority))
            except OSError as error:  # ssl's are some too
                problem = f"{authority} holds no certificate: {error}"
                raise AdminUnavailable(url=url, problem=problem) from error
        try:
            self._client = httpx.Client(
                base_url=self._url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=timeout_s,
                verify=verify,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise AdminUnavailable(url=url, problem=str(error)) from error

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def __enter__(self) -> RemoteAdmin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def status(self) -> PoolReport:
        """See `StoreAdmin.status`."""
        return self._ask("GET", "/status", PoolReport)

    def blocks(
        self,
        *,
        after: str = "",
        limit: int = 1000,
        tenant: str | None = None,
        group: str | None = None,
    ) -> BlockPage:
        """See `StoreAdmin.blocks`."""
        given = {"after": after, "limit": str(limit), "tenant": tenant, "group": group}
        query = {name: value for name, value in given.items() if value is not None}
        return self._ask("GET", "/blocks", BlockPage, params=query)

    def tenants(self) -> TenantPage:
        """See `StoreAdmin.tenants`."""
        return self._ask("GET", "/tenants", TenantPage)

    def writers(self) -> WriterPage:
        """See `StoreAdmin.writers`."""
        return self._ask("GET", "/writers", WriterPage)

    def confirm_dead(self, writer: str) -> None:
        """See `StoreAdmin.confirm_dead`."""
        self._ask("POST", f"/writers/{quote(writer, safe='')}/dead", dict[str, Any])

    def drain(
        self, node: str, *, cancel: bool = False, fewer_copies: bool = False, again: bool = False
    ) -> DrainReport:
        """See `StoreAdmin.drain`."""
        path = f"/drains/{quote(node, safe='')}"
        if cancel:
            return self._ask("DELETE", path, DrainReport)
        order = {"fewer_copies": fewer_copies, "again": again}
        return self._ask("POST", path, DrainReport, json=order)

    def rebalance(self, nbytes_max: int) -> RebalanceReport:
        """See `StoreAdmin.rebalance`."""
        return self._ask("POST", "/rebalance", RebalanceReport, json={"nbytes_max": nbytes_max})

    def set_quota(self, tenant: str, nbytes: int | None) -> None:
        """See `StoreAdmin.set_quota`."""
        path = f"/tenants/{quote(tenant, safe='')}/quota"
        self._ask("PUT", path, dict[str, Any], json={"nbytes": nbytes})

    def verify(self, options: VerifyOptions) -> str:
        """Begin a verification; return its id."""
        body = msgspec.to_builtins(options)
        return self._ask("POST", "/verifications", _JobBody, json=body).id

    def verification(self, job_id: str, *, wait_s: float = WAIT_S) -> VerifyReport:
        """Return how far it is, at its end or after so long."""
        path = f"/verifications/{quote(job_id, safe='')}"
        return self._ask("GET", path, VerifyReport, params={"wait_s": str(wait_s)})

    def cancel_verification(self, job_id: str) -> VerifyReport:
        """Stop a verification."""
        return self._ask("DELETE", f"/verifications/{quote(job_id, safe='')}", VerifyReport)

    def _ask(self, method: str, path: str, kind: type[BodyT], **options: Any) -> BodyT:
        try:
            answer = self._client.request(method, PREFIX + path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            detail = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, httpx.RemoteProtocolError) and self._url.startswith("http:"):
                detail += " (is it an https: service?)"
            raise AdminUnavailable(url=self._url, problem=detail) from error
        try:
            if answer.is_success:
                return msgspec.json.decode(answer.content, type=kind)
            problem = msgspec.json.decode(answer.content, type=_ErrorBody).error.problem
        except msgspec.MsgspecError as error:
            what = "not an administration service of the store, or one of another version"
            raise AdminUnavailable(
                url=self._url, problem=f"{what} (HTTP {answer.status_code})"
            ) from error
        if answer.status_code == 503:
            raise AdminUnavailable(url=self._url, problem=problem)
        operation = f"{method} {path}"
        raise AdminRefused(operation=operation, status=answer.status_code, problem=problem)
