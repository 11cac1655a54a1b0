"""The verifications of one service: one at a time, the last ones remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvstore.admin.reports import VerifyOptions, VerifyState
from kvstore.admin.verify_job import VerifyJob
from kvstore.errors import AdminRefused

if TYPE_CHECKING:
    from configs.schema import TransferConfig
    from kvstore.admin.store_admin import StoreAdmin

REMEMBERED_MAX: Final = 8


class VerifyJobs:
    """Starts verifications and finds them again. Thread-safe.

    Args:
        admin: Lists the blocks.
        transfer: Of the engines that read.
        secret: The cluster secret.
    """

    def __init__(self, admin: StoreAdmin, transfer: TransferConfig, *, secret: bytes) -> None:
        self._admin = admin
        self._transfer = transfer
        self._secret = secret
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, VerifyJob] = OrderedDict()

    def start(self, options: VerifyOptions) -> VerifyJob:
        """Begin a verification.

        Raises:
            AdminRefused: One is running (409): two would read each other's bandwidth away.
        """
        with self._lock:
            for job in self._jobs.values():
                if job.report().state is VerifyState.RUNNING:
                    problem = f"verification {job.job_id} is running"
                    raise AdminRefused(operation="verify", status=409, problem=problem)
            job = VerifyJob(self._admin, self._transfer, secret=self._secret, options=options)
            self._jobs[job.job_id] = job
            while len(self._jobs) > REMEMBERED_MAX:
                self._jobs.popitem(last=False)
            job.start()
            return job

    def find(self, job_id: str) -> VerifyJob:
        """Return a verification by its id.

        Raises:
            AdminRefused: There is none of that id any more (404).
        """
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            problem = f"there is no verification {job_id!r}"
            raise AdminRefused(operation="verify", status=404, problem=problem)
        return job

    def close(self) -> None:
        """Stop what is running, and wait for it."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.close()
