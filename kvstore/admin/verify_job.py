"""A verification in the background, with progress for who asks."""

from __future__ import annotations

import logging
import secrets
import threading
from typing import TYPE_CHECKING, Final

from kvstore.admin.reports import VerifyOptions, VerifyReport, VerifyState
from kvstore.admin.verifier import Verifier
from kvstore.errors import StoreClosed

if TYPE_CHECKING:
    from configs.schema import TransferConfig
    from kvstore.admin.store_admin import StoreAdmin

logger = logging.getLogger(__name__)

_JOIN_S: Final = 60.0


class VerifyJob:
    """One verification in a thread of its own. Thread-safe. Closing it stops it.

    Args:
        admin: Lists the blocks.
        transfer: Of the engine that reads.
        secret: The cluster secret.
        options: What to verify.
    """

    def __init__(
        self,
        admin: StoreAdmin,
        transfer: TransferConfig,
        *,
        secret: bytes,
        options: VerifyOptions,
    ) -> None:
        self.job_id: Final = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._report = VerifyReport(state=VerifyState.RUNNING)
        self._verifier = Verifier(
            admin, transfer, secret=secret, options=options, on_progress=self._take
        )
        self._thread = threading.Thread(target=self._run, name="store-verify", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def report(self) -> VerifyReport:
        """Return what has been found so far."""
        with self._changed:
            return self._report

    def wait(self, timeout_s: float) -> VerifyReport:
        """Wait for the end, at most so long; return what has been found."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._report.state is not VerifyState.RUNNING, timeout=timeout_s
            )
            return self._report

    def cancel(self) -> None:
        """Stop soon; the report then says `cancelled`."""
        self._verifier.stop()

    def close(self) -> None:
        """Stop, and wait until nothing is read any more; idempotent."""
        self.cancel()
        if self._thread.ident is None:
            return
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise StoreClosed(what="VerifyJob", problem=f"did not stop within {_JOIN_S:g} s")

    def _take(self, report: VerifyReport) -> None:
        with self._changed:
            self._report = report
            self._changed.notify_all()

    def _run(self) -> None:
        # The verifier reports its own failures; this one tells of ours.
        try:
            self._verifier.run()
        finally:
            with self._changed:
                if self._report.state is VerifyState.RUNNING:
                    self._report = VerifyReport(state=VerifyState.FAILED, problem="internal error")
                self._changed.notify_all()
