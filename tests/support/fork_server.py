"""One fork server for all tests, in which what their processes run is imported already.

A child is there in ten milliseconds then; one that has to import a store takes a third of a second
of computing, one that imports torch one and a half. There is one server in a process, and whoever
starts the first child says what it imports: so all take the context from here.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",  # by tests whose functions run in a child
        "torch.distributed",
        "dispatch.transfer_dispatcher",
        "tests.support.busy_client",
        "tests.support.doomed_writer",
        "tests.support.killed_writer",
        "tests.support.lending_process",
        "tests.support.master_process",
        "tests.support.posting_process",
        "tests.support.rank_pool",
        "tests.support.round_worker",
        "tests.support.store_worker",
        "tests.support.storming_process",
        "tests.support.viewing_process",
    ]
)
