"""The few things that the store asks of etcd, over its HTTP gateway.

    create   transaction: put the key with a lease if nobody has it; its revision is the term
    range    all keys under a prefix, and the revision at which that was so
    watch    the changes under a prefix after a revision, as they happen

Each thread has a gateway of its own; a request that fails is tried at the next endpoint.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvstore.errors import EtcdUnavailable

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client
    from requests import Response

    from configs.kvstore_masters import EtcdConfig

T = TypeVar("T")
WATCH_S: Final = 30.0  # a watch that tells nothing for so long is begun anew


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdEntry:
    """One key. `value` is None if it was deleted; `revision` is of its creation (or deletion)."""

    key: str
    value: bytes | None
    revision: int


class EtcdGateway:
    """Requests of one thread. Not thread-safe, but for `interrupt`.

    Args:
        config: Where and as whom.
        timeout_s: Deadline of one try at one endpoint; default: the configured one.
    """

    def __init__(self, config: EtcdConfig, *, timeout_s: float | None = None) -> None:
        self._config = config
        self._timeout_s = config.timeout_s if timeout_s is None else timeout_s
        self._client: Etcd3Client | None = None
        self._turn = 0
        self._lock = threading.Lock()  # the watch under way, for `interrupt`
        self._watching: Response | None = None
        self._interrupted = False

    def close(self) -> None:
        """Free the connections."""
        if self._client is not None:
            self._client.session.close()
            self._client = None

    def grant(self, ttl_s: int) -> int:
        """Return the number of a new lease."""
        return int(self._call("grant", lambda c: c.lease(ttl_s).id))

    def keep_alive(self, lease: int) -> bool:
        """Let a lease begin anew; False if it is over already."""

        def refresh(client: Etcd3Client) -> int:
            result = client.post(client.get_url("/lease/keepalive"), json={"ID": lease})
            return int(result["result"].get("TTL", -1))

        return self._call("keep alive", refresh) > 0

    def revoke(self, lease: int) -> None:
        """End a lease, and with it all keys that were created with it."""
        path = "/lease/revoke"
        self._call("revoke", lambda c: c.post(c.get_url(path), json={"ID": lease}))

    def create(self, key: str, value: bytes, *, lease: int = 0) -> int | None:
        """Put a key if nobody has it; return the revision, or None if somebody has."""
        put = {"key": _encoded(key.encode()), "value": _encoded(value), "lease": lease}
        transaction = {
            "compare": [
                {
                    "key": put["key"],
                    "target": "CREATE",
                    "result": "EQUAL",
                    "create_revision": 0,
                }
            ],
            "success": [{"request_put": put}],
            "failure": [],
        }
        result = self._call("create", lambda c: c.transaction(transaction))
        if not result.get("succeeded"):
            return None
        return int(result["header"]["revision"])

    def range(self, prefix: str) -> tuple[int, list[EtcdEntry]]:
        """Return the current revision, and all keys under a prefix."""
        body = {"key": _encoded(prefix.encode()), "range_end": _encoded(_end(prefix.encode()))}
        result = self._call("range", lambda c: c.post(c.get_url("/kv/range"), json=body))
        found = [_entry(kv) for kv in result.get("kvs", [])]
        return int(result["header"]["revision"]), found

    def watch(self, prefix: str, *, after: int) -> Iterator[EtcdEntry]:
        """Yield changes after a revision, until nothing has happened for a while or `interrupt`.

        Raises:
            EtcdUnavailable: The connection ended, or the revision is too old.
        """
        key, end = _encoded(prefix.encode()), _encoded(_end(prefix.encode()))
        create = {"key": key, "range_end": end, "start_revision": after + 1}
        response = self._call("watch", lambda c: self._open_watch(c, {"create_request": create}))
        try:
            with self._lock:
                self._watching = None if self._interrupted else response
            if self._watching is not None:
                yield from self._changes(response)
        finally:
            with self._lock:
                self._watching = None
            response.close()

    def interrupt(self) -> None:
        """End the watch that is under way, and all later ones at once. Thread-safe."""
        with self._lock:
            self._interrupted = True
            if self._watching is None:
                return
            with contextlib.suppress(OSError, ValueError):
                copy = os.dup(self._watching.raw.fileno())
                with socket.socket(fileno=copy) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _open_watch(self, client: Etcd3Client, body: dict[str, Any]) -> Response:
        return client.session.post(
            client.get_url("/watch"),
            json=body,
            stream=True,
            timeout=(self._timeout_s, WATCH_S),
        )

    def _changes(self, response: Response) -> Iterator[EtcdEntry]:
        import requests

        try:
            rest = b""
            for chunk in response.iter_content(chunk_size=None):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield from _events(line)
        except requests.exceptions.ReadTimeout:
            return
        except requests.exceptions.ConnectionError as error:
            if "timed out" in str(error) or self._interrupted:
                return
            raise EtcdUnavailable(operation="watch", problem=str(error)) from error
        except (requests.exceptions.RequestException, AttributeError) as error:
            if not self._interrupted:
                raise EtcdUnavailable(operation="watch", problem=str(error)) from error

    def _call(self, operation: str, do: Callable[[Etcd3Client], T]) -> T:
        import requests
        from etcd3gw.exceptions import Etcd3Exception

        problem = "no endpoint"
        for _ in range(len(self._config.endpoints) + 1):
            try:
                if self._client is None:
                    self._client = self._connect()
                return do(self._client)
            except (Etcd3Exception, requests.exceptions.RequestException) as error:
                detail = getattr(error, "detail_text", None)
                problem = f"{type(error).__name__}: {detail or error}"
            except (KeyError, ValueError, TypeError) as error:
                problem = f"not understood: {type(error).__name__}: {error}"
            # The next endpoint, with a fresh token of the user's: either may have been what failed.
            self.close()
            self._turn += 1
        raise EtcdUnavailable(operation=operation, problem=problem)

    def _connect(self) -> Etcd3Client:
        from etcd3gw.client import Etcd3Client

        config = self._config
        endpoint = config.endpoints[self._turn % len(config.endpoints)]
        scheme, _, place = endpoint.partition("://")
        host, _, port = place.rpartition(":")
        client = Etcd3Client(
            host=host.strip("[]"),
            port=int(port),
            protocol=scheme,
            ca_cert=None if config.ca_file is None else str(config.ca_file),
            cert_cert=None if config.cert_file is None else str(config.cert_file),
            cert_key=None if config.key_file is None else str(config.key_file),
            timeout=self._timeout_s,
        )
        # Proxies and passwords of the process's environment are meant for other services.
        client.session.trust_env = False
        if config.user is not None and config.password_file is not None:
            password = config.password_file.read_text().strip()
            found = client.post(
                client.get_url("/auth/authenticate"),
                json={"name": config.user, "password": password},
            )
            client.session.headers["Authorization"] = found["token"]
        return client


def _events(line: bytes) -> Iterator[EtcdEntry]:
    try:
        result = msgspec.json.decode(line)["result"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise EtcdUnavailable(operation="watch", problem=f"not understood: {line!r}") from error
    if result.get("canceled") or int(result.get("compact_revision", 0)):
        problem = result.get("cancel_reason", "the revision is gone")
        raise EtcdUnavailable(operation="watch", problem=problem)
    for event in result.get("events", []):
        yield _entry(event["kv"], deleted=event.get("type") == "DELETE")


def _entry(kv: dict[str, Any], *, deleted: bool = False) -> EtcdEntry:
    revision = kv["mod_revision"] if deleted else kv["create_revision"]
    return EtcdEntry(
        key=base64.b64decode(kv["key"]).decode(),
        value=None if deleted else base64.b64decode(kv.get("value", "")),
        revision=int(revision),
    )


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _end(prefix: bytes) -> bytes:
    """Return the first key after all those with this prefix (ASCII, so its last byte can grow)."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))
