"""The administration service: HTTP with uvicorn in a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Final

import uvicorn
from prometheus_client import CollectorRegistry

from configs.kvstore_admin import is_loopback
from kvstore.admin.http_app import create_app
from kvstore.admin.metrics import MasterCollector
from kvstore.admin.patient_protocol import PatientProtocol
from kvstore.admin.store_admin import StoreAdmin
from kvstore.admin.tokens import read_token
from kvstore.admin.verify_jobs import VerifyJobs
from kvstore.errors import StoreClosed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from configs.kvstore_admin import KVAdminConfig
    from configs.schema import TransferConfig
    from kvstore.discovery.directory import MasterDirectory

logger = logging.getLogger(__name__)

START_S: Final = 10.0
STOP_S: Final = 5
JOIN_S: Final = 30.0
KEEP_ALIVE_S: Final = 5
CONNECTIONS_MAX: Final = 512  # beyond it all are refused, probes too


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets=sockets)
        self.listening.set()


class AdminServer:
    """One listening port for administrators of one pool. Thread-safe.

    Args:
        config: Where, and who may ask.
        masters: As for `StoreAdmin`.
        transfer: Of the engines that verify.
        secret: The cluster secret.
    """

    def __init__(
        self,
        config: KVAdminConfig,
        masters: str | Sequence[str] | MasterDirectory,
        transfer: TransferConfig,
        *,
        secret: bytes,
    ) -> None:
        self._config = config
        self.admin: Final = StoreAdmin(masters, secret=secret)
        #: whoever runs nodes and clients in this process adds their collectors
        self.registry: Final = CollectorRegistry()
        self.registry.register(MasterCollector(self.admin))
        self._jobs = VerifyJobs(self.admin, transfer, secret=secret)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.url = ""

    def open(self) -> None:
        """Listen; `url` is set afterwards.

        Raises:
            AdminTokenInvalid: There is no usable token.
            OSError: The address can't be bound, or the certificate can't be read.
            ValueError: Beyond loopback without a certificate.
        """
        config = self._config
        if config.token_file is None:
            raise ValueError("the administration service needs a token_file")
        if config.certificate is None and not is_loopback(config.host):
            raise ValueError(f"{config.host} is not loopback, and there is no certificate")
        app = create_app(
            self.admin,
            self._jobs,
            self.registry,
            token=read_token(config.token_file),
            open_metrics=config.open_metrics,
        )
        settings = uvicorn.Config(
            app,
            http=PatientProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=config.certificate,
            ssl_keyfile=config.private_key,
        )
        settings.load()  # here, where the caller sees what is wrong with the certificate
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host, config.port), family=family, backlog=128)
        self._serve(_Server(settings), listener)

    def close(self) -> None:
        """Stop listening and verifying; idempotent."""
        server, thread = self._server, self._thread
        if server is not None and thread is not None:
            server.should_exit = True
            thread.join(JOIN_S)
            if thread.is_alive():
                raise StoreClosed(what="AdminServer", problem=f"did not stop in {JOIN_S:g} s")
            self._server = self._thread = None
        self._jobs.close()
        self.admin.close()

    def _serve(self, server: _Server, listener: socket.socket) -> None:
        def run() -> None:
            with listener:
                server.run(sockets=[listener])

        host, port = listener.getsockname()[:2]
        self._server = server
        self._thread = threading.Thread(target=run, name="store-admin", daemon=True)
        self._thread.start()
        if not server.listening.wait(START_S):
            self.close()
            raise StoreClosed(what="AdminServer", problem=f"did not start in {START_S:g} s")
        scheme = "http" if self._config.certificate is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("administration of the store on %s", self.url)

    def __enter__(self) -> AdminServer:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
