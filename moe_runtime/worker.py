"""`python -m moe_runtime.worker`: one rank, started by torchrun or by `moe-runtime launch`.

From torchrun it takes RANK, LOCAL_RANK and WORLD_SIZE; everything else it learns from the
configuration and from the membership store of the front. The process ends with status 0 when it
was told to stop or to leave, and with 1 and one line when it cannot serve.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from moe_runtime.options import config_options, failures_in_one_line, load_from_options
from moe_runtime.parent import NODE_VARIABLE
from moe_runtime.process_end import run_and_end

if TYPE_CHECKING:
    from types import FrameType

    from configs.schema import RuntimeConfig
    from elastic import MembershipStore
    from moe_runtime.incarnation import Incarnation, Surroundings, Weights

logger = logging.getLogger("moe_runtime.worker")  # also when it is __main__

FRONT_KEY = "front/control"
MASTER_KEY = "kvstore/master"
# The rank loop shares the interpreter with threads that copy blocks; a short interval keeps a
# pass from waiting for their bytecode (the default is 5 ms).
SWITCH_INTERVAL_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which worker this is, from the environment that torchrun sets.

    Attributes:
        node: Names the agent that started it: workers of one agent share a failure domain.
    """

    rank: int
    local_rank: int
    node: str

    @classmethod
    def from_environment(cls) -> Place:
        """Read RANK and LOCAL_RANK; a worker started by hand is rank 0 of its own."""
        node = os.environ.get(NODE_VARIABLE) or f"{socket.gethostname()}-{os.getppid()}"
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            node=node,
        )


def load_weights(config: RuntimeConfig, stack: ExitStack) -> Weights:
    """Read the dense weights and set up expert bank and KV pages; `stack` frees them.

    Raises:
        CheckpointError: The checkpoint can't be served.
    """
    import torch

    from moe_runtime.incarnation import Weights
    from moe_runtime.models.checkpoint import Checkpoint
    from moe_runtime.models.experts import ExpertBank
    from moe_runtime.models.paged_kv import PagedKV
    from moe_runtime.models.qwen3_moe import Qwen3MoeModel
    from transfer import allocate

    torch.set_num_threads(config.model.threads)
    checkpoint = stack.enter_context(Checkpoint(config.model.path))
    spec = checkpoint.spec
    name = config.model.dtype
    dtype = checkpoint.dtype if name == "auto" else getattr(torch, name)
    bank = ExpertBank(spec, dtype, allocate)
    stack.callback(bank.close)
    model = Qwen3MoeModel(
        spec,
        checkpoint,
        bank,
        dtype=dtype,
        exactness=config.model.exactness,
        microbatch_tokens=config.dispatch.microbatch_tokens,
    )
    pages, page_tokens = config.scheduler.num_pages, config.scheduler.page_tokens
    kv_memory = allocate(PagedKV.nbytes(pages, spec, page_tokens, dtype))
    stack.callback(kv_memory.close)
    kv = PagedKV(kv_memory, pages, spec, page_tokens, dtype)
    return Weights(
        checkpoint=checkpoint,
        bank=bank,
        model=model,
        kv=kv,
        kv_memory=kv_memory,
        dtype=dtype,
        fingerprint=checkpoint.fingerprint(),
    )


def find_surroundings(
    config: RuntimeConfig, place: Place, membership: MembershipStore
) -> Surroundings:
    """Ask the membership store where front and store master are, and claim a rank."""
    from moe_runtime.cluster_secret import read_secret
    from moe_runtime.incarnation import Surroundings

    wait_s = config.elastic.bootstrap_timeout_s
    return Surroundings(
        secret=read_secret(config.cluster),
        membership=membership,
        front_address=membership.get(FRONT_KEY, timeout_s=wait_s).decode(),
        master_address=membership.get(MASTER_KEY, timeout_s=wait_s).decode(),
        rank=membership.claim_slot(place.node, place.local_rank, place.rank),
        node=place.node,
    )


class Worker:
    """The process: weights for good, and one incarnation after the other."""

    def __init__(self, config: RuntimeConfig, place: Place) -> None:
        self._config = config
        self._place = place
        self._incarnation: Incarnation | None = None
        self._stopping = False

    def run(self) -> None:
        """Serve until a signal or the front ends it."""
        from elastic import Evicted, TCPStoreMembership
        from elastic.agent import incarnation_of_this_process
        from moe_runtime.incarnation import Incarnation

        cluster, deadline_s = self._config.cluster, self._config.elastic.store_timeout_s
        with ExitStack() as stack:
            membership = TCPStoreMembership(
                cluster.membership_host, cluster.membership_port, timeout_s=deadline_s
            )
            stack.callback(membership.close)
            around = find_surroundings(self._config, self._place, membership)
            weights = load_weights(self._config, stack)
            logger.info("rank %d: weights ready", around.rank)
            # The agent names the first life, so that the others know when the process has ended.
            name = incarnation_of_this_process()
            while not self._stopping:
                self._incarnation = Incarnation(self._config, weights, around, name=name)
                try:
                    self._incarnation.run()
                    return
                except Evicted as eviction:
                    logger.warning("rank %d: %s; joining anew", around.rank, eviction)
                    # Its engine is closed: nothing of that life can write any more, and what was
                    # set aside because it might can be used again.
                    membership.report_exit(name, "evicted; its process goes on under another name")
                    name = secrets.token_hex(8)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM leaves in a planned way; a second one, or SIGINT, stops at once."""
        del frame
        again, self._stopping = self._stopping, True
        if self._incarnation is None:
            sys.exit(0)
        if signum == signal.SIGTERM and not again:
            self._incarnation.leave()
        else:
            self._incarnation.stop()


@click.command("worker")
@config_options(default_preset="example")
def worker_command(**options: object) -> None:
    """Run one rank (use `torchrun -m moe_runtime.worker` or `moe-runtime launch`)."""
    from moe_runtime.logs import configure_logging

    place = Place.from_environment()
    configure_logging(f"worker {place.rank}")
    config = load_from_options(options, for_workers=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    worker = Worker(config, place)
    signal.signal(signal.SIGTERM, worker.on_signal)
    signal.signal(signal.SIGINT, worker.on_signal)
    with failures_in_one_line():
        worker.run()


if __name__ == "__main__":
    run_and_end(worker_command)
