"""An administrator with the cluster secret: asks the masters itself, verifies from this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore.admin.reports import VerifyOptions, VerifyReport
from kvstore.admin.store_admin import StoreAdmin
from kvstore.admin.verify_jobs import VerifyJobs

if TYPE_CHECKING:
    from configs.schema import TransferConfig
    from kvstore.discovery.directory import MasterDirectory

CANCEL_S: Final = 30.0


class DirectAdmin(StoreAdmin):
    """`StoreAdmin`, with the verifications of `RemoteAdmin`. Thread-safe.

    Args:
        masters: As for `StoreAdmin`.
        transfer: Of the engines that verify.
        secret: The cluster secret.
        timeout_s: Deadline of one request to a master.
    """

    def __init__(
        self,
        masters: str | Sequence[str] | MasterDirectory,
        transfer: TransferConfig,
        *,
        secret: bytes,
        timeout_s: float = 5.0,
    ) -> None:
        super().__init__(masters, secret=secret, timeout_s=timeout_s)
        self._jobs = VerifyJobs(self, transfer, secret=secret)

    def close(self) -> None:
        """Stop verifying, and ask no more."""
        self._jobs.close()
        super().close()

    def verify(self, options: VerifyOptions) -> str:
        """Begin a verification; return its id. Raises as `VerifyJobs.start`."""
        return self._jobs.start(options).job_id

    def verification(self, job_id: str, *, wait_s: float = 2.0) -> VerifyReport:
        """Return how far it is, at its end or after so long."""
        return self._jobs.find(job_id).wait(wait_s)

    def cancel_verification(self, job_id: str) -> VerifyReport:
        """Stop a verification."""
        job = self._jobs.find(job_id)
        job.cancel()
        return job.wait(CANCEL_S)
