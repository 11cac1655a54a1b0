"""An agent that starts workers on one node and restarts only the one that died.

torchrun restarts all workers of an agent when one of them dies. This agent gives the same
environment, but every worker is a slot of its own:

    starting ──▶ running ──▶ ended ── exit code 0, or the agent stops ──▶ finished
        ▲                      │ ───── died too often ──────────────────▶ given up
        └──── after a pause ◀──┘ otherwise: same slot, new incarnation

Ends are seen at once (pidfd) and written to the membership store as `exit/<incarnation>`, which
is proof for the others. No worker outlives its agent, not even one that is killed with SIGKILL:
the kernel kills a worker when the thread that started it ends (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from types import FrameType

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from configs.schema import ElasticConfig
from elastic.errors import ElasticError, RestartsExhausted
from elastic.store import MembershipStore

logger = logging.getLogger(__name__)

INCARNATION_VARIABLE = "MOE_RUNTIME_INCARNATION"
PR_SET_PDEATHSIG = 1
QUICK_DEATH_S = 5.0
BACKOFF_DOUBLINGS_MAX = 6
POLL_INTERVAL_S = 0.5
KILL_TIMEOUT_S = 10.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Loaded here: between fork and exec of a process with threads as little as possible may happen.
_libc = ctypes.CDLL(None, use_errno=True)


def incarnation_of_this_process(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name that the agent gave to this life of the process, or a fresh one."""
    return environment.get(INCARNATION_VARIABLE) or secrets.token_hex(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """What an agent runs.

    Attributes:
        command: Program and arguments, the same for all.
        num_workers: Workers on this node.
        node_rank: Position of this node; the first worker's RANK is `node_rank * num_workers`.
        num_nodes: Nodes of the job; all have `num_workers`.
        master_addr: MASTER_ADDR.
        master_port: MASTER_PORT.
        run_id: TORCHELASTIC_RUN_ID.
        environment: Added to the agent's own.
        log_folder: Where output goes, one file per life; None: the agent's own output.
    """

    command: tuple[str, ...]
    num_workers: int
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    run_id: str = "moe-runtime"
    environment: Mapping[str, str] = field(default_factory=dict)
    log_folder: Path | None = None

    def environment_of(self, local_rank: int, restarts: int, incarnation: str) -> dict[str, str]:
        """Return the variables of one life of one worker, named as torchrun names them."""
        return {
            **self.environment,
            "LOCAL_RANK": str(local_rank),
            "RANK": str(self.node_rank * self.num_workers + local_rank),
            "GROUP_RANK": str(self.node_rank),
            "ROLE_RANK": str(self.node_rank * self.num_workers + local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_workers),
            "WORLD_SIZE": str(self.num_nodes * self.num_workers),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_WORLD_SIZE": str(self.num_nodes * self.num_workers),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            # With "True", init_process_group would look for a store that this agent has not.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            INCARNATION_VARIABLE: incarnation,
        }


class _Handler(SubprocessHandler):
    """A worker process that dies with the thread that started it."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        agent_pid = os.getpid()

        def die_with_agent() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent_pid:  # it ended before the call above
                os._exit(1)

        return Popen(
            args,
            env=env,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
            preexec_fn=die_with_agent,
        )


@dataclass(slots=True)
class _Slot:
    local_rank: int
    restarts: int = 0
    quick_deaths: int = 0
    incarnation: str = ""
    handler: SubprocessHandler | None = None
    pidfd: int = -1
    started_s: float = 0.0
    start_at_s: float | None = 0.0  # None: running, finished or given up
    exit_code: int | None = None  # of a slot that is over

    @property
    def pid(self) -> int | None:
        return None if self.handler is None else self.handler.proc.pid


class LocalAgent:
    """Runs a `WorkerGroup`. All methods but `request_stop` on one thread, which must outlive it.

    Args:
        config: Backoff and the number of restarts.
        group: What to run.
        store: Where ends are reported; None: nowhere.
        drain_timeout_s: How long workers may take after SIGTERM before they are killed.
    """

    def __init__(
        self,
        config: ElasticConfig,
        group: WorkerGroup,
        *,
        store: MembershipStore | None = None,
        drain_timeout_s: float = 30.0,
    ) -> None:
        self._config = config
        self._group = group
        self._store = store
        self._drain_timeout_s = drain_timeout_s
        self._slots = [_Slot(local_rank) for local_rank in range(group.num_workers)]
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def pids(self) -> dict[int, int]:
        """Return local rank -> process id of the running workers."""
        return {s.local_rank: pid for s in self._slots if (pid := s.pid) is not None}

    def incarnations(self) -> dict[int, str]:
        """Return local rank -> incarnation of the running workers."""
        return {s.local_rank: s.incarnation for s in self._slots if s.handler is not None}

    def run(self) -> int:
        """Start the workers and keep them running until all are over or a stop is requested.

        Returns:
            0 if every worker ended with exit code 0 or as asked to, else 1.
        """
        try:
            while not self._stopping and not self.over:
                self.poll(POLL_INTERVAL_S)
            self.stop()
        finally:
            self._kill_all()
            self._close()
        return int(any(slot.exit_code for slot in self._slots))

    def run_until_signal(self) -> int:
        """Like `run`, with SIGTERM and SIGINT taken as a request to stop. Main thread only."""

        def request(number: int, frame: FrameType | None) -> None:
            del frame
            logger.info("signal %d: stopping the workers", number)
            self.request_stop()

        before = {number: signal.signal(number, request) for number in STOP_SIGNALS}
        try:
            return self.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def over(self) -> bool:
        """Whether no worker runs and none will be started again."""
        return all(s.handler is None and s.start_at_s is None for s in self._slots)

    def request_stop(self) -> None:
        """Make `run` stop the workers and return. Any thread, or a signal handler."""
        self._stopping = True
        if self._wake_write >= 0:
            os.write(self._wake_write, b"x")

    def poll(self, timeout_s: float) -> None:
        """Start what is due, then wait for an end up to `timeout_s` and deal with it."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.start_at_s is not None and slot.start_at_s <= now and not self._stopping:
                self._start(slot)
        due = [s.start_at_s - now for s in self._slots if s.start_at_s is not None]
        self._wait(max(0.0, min([timeout_s, *due])))
        for slot in self._slots:
            if slot.handler is not None and slot.handler.proc.poll() is not None:
                self._on_end(slot)

    def stop(self) -> None:
        """Ask all workers to end, and kill those that have not after the drain timeout."""
        self._stopping = True
        for slot in self._slots:
            slot.start_at_s = None
            self._signal(slot, signal.SIGTERM)
        deadline = time.monotonic() + self._drain_timeout_s
        while self.pids() and (left_s := deadline - time.monotonic()) > 0:
            self.poll(min(POLL_INTERVAL_S, left_s))
        self._kill_all()

    def _start(self, slot: _Slot) -> None:
        slot.incarnation = secrets.token_hex(8)
        slot.start_at_s = None
        slot.started_s = time.monotonic()
        log = self._log_file(slot)
        program, *arguments = self._group.command
        try:
            slot.handler = _Handler(
                entrypoint=program,
                args=tuple(arguments),
                env=self._group.environment_of(slot.local_rank, slot.restarts, slot.incarnation),
                stdout=log,
                stderr=log,
                local_rank_id=slot.local_rank,
                numa_options=None,
            )
        except OSError as error:
            if slot.restarts == 0:
                raise  # there is no such program, say
            # No memory for one more process, perhaps: the others must not die of that.
            logger.warning("worker %d could not be started again: %s", slot.local_rank, error)
            self._plan_restart(slot, 1, self._config.restart_backoff_s)
            return
        slot.pidfd = os.pidfd_open(slot.handler.proc.pid)
        logger.info(
            "worker %d started: pid %d, incarnation %s, restart %d",
            slot.local_rank,
            slot.handler.proc.pid,
            slot.incarnation,
            slot.restarts,
        )

    def _log_file(self, slot: _Slot) -> str | None:
        folder = self._group.log_folder
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f"worker-{slot.local_rank}.{slot.restarts}.log")

    def _wait(self, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for slot in self._slots:
            if slot.handler is not None:
                poller.register(slot.pidfd, select.POLLIN)
        for fd, _ in poller.poll(timeout_s * 1e3):
            if fd == self._wake_read:
                os.read(fd, 64)

    def _on_end(self, slot: _Slot) -> None:
        assert slot.handler is not None
        code = slot.handler.proc.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        lived_s = time.monotonic() - slot.started_s
        self._release(slot)
        logger.info("worker %d ended after %.1f s: %s", slot.local_rank, lived_s, how)
        self._report(slot.incarnation, how)
        if code == 0 or self._stopping:
            slot.exit_code = 0 if self._stopping else code
        else:
            slot.quick_deaths = slot.quick_deaths + 1 if lived_s < QUICK_DEATH_S else 0
            self._plan_restart(slot, code, self._backoff_s(slot.quick_deaths))

    def _plan_restart(self, slot: _Slot, code: int, pause_s: float) -> None:
        if slot.restarts >= self._config.max_restarts:
            slot.exit_code = code
            error = RestartsExhausted(local_rank=slot.local_rank, restarts=slot.restarts)
            logger.error("%s", error)
        else:
            slot.restarts += 1
            slot.start_at_s = time.monotonic() + pause_s

    def _backoff_s(self, quick_deaths: int) -> float:
        if quick_deaths < 2:  # once is an accident
            return 0.0
        doublings = min(quick_deaths - 2, BACKOFF_DOUBLINGS_MAX)
        return float(self._config.restart_backoff_s * 2**doublings)

    def _report(self, incarnation: str, how: str) -> None:
        if self._store is None:
            return
        try:
            self._store.report_exit(incarnation, how)
        except ElasticError as error:
            logger.warning("the end of %s could not be reported: %s", incarnation, error)

    def _signal(self, slot: _Slot, number: signal.Signals) -> None:
        if slot.handler is None:
            return
        try:
            signal.pidfd_send_signal(slot.pidfd, number)
        except ProcessLookupError:
            logger.debug("worker %d has ended already", slot.local_rank)

    def _kill_all(self) -> None:
        running = [slot for slot in self._slots if slot.handler is not None]
        for slot in running:  # all of them before the first is waited for
            logger.warning("worker %d did not end in time: killed", slot.local_rank)
            self._signal(slot, signal.SIGKILL)
        for slot in running:
            assert slot.handler is not None
            slot.handler.proc.wait(timeout=KILL_TIMEOUT_S)
            self._on_end(slot)

    def _release(self, slot: _Slot) -> None:
        handler, slot.handler = slot.handler, None
        assert handler is not None
        os.close(slot.pidfd)
        slot.pidfd = -1
        for stream in (handler._stdout, handler._stderr):
            if stream is not None:
                stream.close()

    def _close(self) -> None:
        ends = (self._wake_read, self._wake_write)
        self._wake_read = self._wake_write = -1
        for end in ends:
            os.close(end)
