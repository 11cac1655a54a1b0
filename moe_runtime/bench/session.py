"""Sets up both ends of a measurement as the options say, and takes them down again."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from configs.schema import ClusterConfig, TransferBackend, TransferConfig
from moe_runtime.bench.errors import BackendMissing
from moe_runtime.bench.measuring import Measurer
from moe_runtime.bench.remote import (
    LocalRemote,
    NotifyRemote,
    Remote,
    fresh_secret,
    open_window,
    target_process,
)
from moe_runtime.bench.usage import pin
from moe_runtime.bench.workload import Case
from moe_runtime.cluster_secret import SECRET_BYTES_MIN, SecretInvalid, read_secret
from transfer import Priority, Region, TransferEngine, allocate

if TYPE_CHECKING:
    from transfer import Peer

SECRET_VARIABLE: Final = "MOE_RUNTIME_SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How both ends are set up.

    Attributes:
        backend: "auto", "shared_memory", "tcp", "verbs", "local", "file".
        folder: where the slab of backend "file" is made.
        host: address to listen on.
        rails: local addresses of the rails; empty for the default.
        connections: data connections per tcp peer; None for the default.
        priority: name of a priority class; None for the default.
        prepared: whether operations are prepared.
        private: whether the target's memory is ordinary memory, which nobody can map.
        cores: where both sides may run; None for anywhere.
        connect: address of a target that runs already; None to start one.
        secret: of the cluster; None for a fresh one.
        check: whether arrived bytes are compared.
    """

    backend: str
    host: str = "127.0.0.1"
    rails: tuple[str, ...] = ()
    connections: int | None = None
    priority: str | None = None
    prepared: bool = False
    private: bool = False
    cores: tuple[int, ...] | None = None
    connect: str | None = None
    folder: Path | None = None
    secret: bytes | None = None
    check: bool = True

    def config(self) -> TransferConfig:
        """The engine's configuration, the same on both sides.

        Raises:
            BackendMissing: this build does not know what is asked for.
            ValueError: a value that the configuration refuses.
        """
        values: dict[str, Any] = {"host": self.host}
        if self.backend not in ("local", "file"):
            if self.backend not in set(TransferBackend):
                raise BackendMissing(wanted=self.backend, problem="this build has none")
            values["backend"] = self.backend
        if self.connections is not None:
            values["tcp_connections"] = self.connections
        if self.rails:
            values["rails"] = self.rails
        return TransferConfig.model_validate(values)


def secret_from(path: Path | None) -> bytes | None:
    """Read the secret from a file that only its owner can read, or from the environment.

    Raises:
        SecretInvalid: it is there and cannot be used.
    """
    if path is not None:
        return read_secret(ClusterConfig(secret_file=path))
    value = os.environ.get(SECRET_VARIABLE)
    if value is None:
        return None
    if len(value) < SECRET_BYTES_MIN:
        problem = f"{len(value)} bytes, expected at least {SECRET_BYTES_MIN}"
        raise SecretInvalid(path=f"${SECRET_VARIABLE}", problem=problem)
    return value.encode()


@contextlib.contextmanager
def measuring(setup: Setup, cases: list[Case]) -> Iterator[Measurer]:
    """Open both ends with room for the largest case.

    Raises:
        BackendMissing: the backend that was asked for is not the one that is used.
        TransferError, TargetEnded, TargetSilent: no target.
        OSError: no memory, an address that is not ours, no such core.
    """
    config = setup.config()
    nbytes = max(case.window_bytes for case in cases)
    if setup.cores is not None:
        pin(setup.cores)
    if setup.folder is not None:
        with _measuring_slab(setup, setup.folder, nbytes) as measurer:
            yield measurer
        return
    secret = setup.secret or fresh_secret()
    engine = TransferEngine(config, name=secrets.token_hex(8), secret=secret)
    with contextlib.ExitStack() as stack:
        remote, same_host = _remote(setup, config, secret, engine, stack)
        memory = allocate(nbytes)
        stack.callback(memory.close)
        region = engine.register(memory)
        key, witness = open_window(remote, nbytes, private=setup.private)
        yield Measurer(
            engine,
            remote,
            region,
            key,
            witness=witness,
            options=_options(setup),
            prepared=setup.prepared,
            same_host=same_host,
            check=setup.check,
        )


@contextlib.contextmanager
def _measuring_slab(setup: Setup, folder: Path, nbytes: int) -> Iterator[Measurer]:
    from moe_runtime.bench.slab import SlabMover, SlabRemote, new_slab

    slab = new_slab(folder, nbytes)
    try:
        with slab, contextlib.closing(allocate(nbytes)) as memory:
            slab.path.unlink()  # it is in use without a name: whoever kills us, nothing is left
            yield Measurer(
                SlabMover(slab),
                SlabRemote(slab),
                Region(memory),
                None,
                witness=None,
                options={},
                prepared=False,
                same_host=True,
                check=setup.check,
            )
    finally:
        slab.path.unlink(missing_ok=True)


def _remote(
    setup: Setup,
    config: TransferConfig,
    secret: bytes,
    engine: TransferEngine,
    stack: contextlib.ExitStack,
) -> tuple[Remote, bool]:
    """Return the target, and whether it runs on this host."""
    if setup.backend == "local":
        stack.enter_context(engine)
        local = LocalRemote(engine)
        stack.callback(local.close)
        return local, True
    if setup.connect is None:
        cores = None if setup.cores is None else list(setup.cores)
        target = stack.enter_context(target_process(config, secret, cores))
        remote, address = NotifyRemote(engine, ending=target.ending), target.address
    else:
        remote, address = NotifyRemote(engine, ending=lambda: None), setup.connect
    stack.enter_context(engine)
    peer = engine.connect(address)
    remote.bind(peer)
    _check_backend(setup.backend, peer)
    return remote, setup.connect is None or _is_here(address)


def _check_backend(wanted: str, peer: Peer) -> None:
    if wanted not in ("auto", peer.backend):
        raise BackendMissing(wanted=wanted, problem=f"the target is reached by {peer.backend}")


def _is_here(address: str) -> bool:
    return address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost")


def _options(setup: Setup) -> dict[str, Any]:
    return {} if setup.priority is None else {"priority": Priority[setup.priority.upper()]}
