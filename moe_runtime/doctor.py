"""`moe-runtime doctor`: what works on this machine, and what is missing or lost without it.

ok    works             note  works, with something to know             FAIL  serving will not
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import click

from moe_runtime import __version__

PACKAGES = ("moe_runtime", "elastic", "dispatch", "kvstore", "transfer", "configs")
DEPENDENCIES = (
    "torch", "numpy", "pydantic", "safetensors", "tokenizers", "fastapi", "uvicorn", "pyzmq",
    "msgspec", "xxhash",
)  # fmt: skip
#: import name, extra, what it is for. Everything else works without them.
EXTRAS = (
    ("triton", "gpu", "the kernels of dispatch for tensors on GPUs"),
    ("pyverbs", "rdma", "transfers over RDMA; the system's own, it has to match its rdma-core"),
    ("deepspeed", "deepspeed", "reading SSD segments of the KV store with DeepNVMe"),
    ("etcd3gw", "etcd", "election of the KV store's masters in etcd"),
)
#: the same, of what this version does not have yet
PLANNED = (
    ("vllm", "vllm", "the vLLM connector"),
    ("sglang", "sglang", "the SGLang storage backend"),
)
#: extension modules, by their paths without suffix
COMPILED = (
    *("transfer/_native", "dispatch/_native", "kvstore/_native", "kvstore/_rows"),
    "moe_runtime/models/_tiles",
)
#: Linux that makes huge pages of a memory file for who asks (MADV_COLLAPSE), whatever its policy
COLLAPSE_RELEASE = (6, 1)
#: policies of `shmem_enabled` with which memory files get huge pages
SHMEM_GIVES = ("always", "within_size", "advise", "force")
MEMORY_BYTES_MIN = 2 << 30
PROBE_BYTES = 1 << 20


class Verdict(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    subject: str
    detail: str


def examine() -> Iterator[Finding]:
    """Look at everything; each look is independent of the others."""
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        _origins,
        _compiled,
        _extras,
        _processors,
        _memory,
        _memfd,
        _huge_pages,
        _process_memory,
        _loopback,
        _temporary_files,
    )
    for look in looks:
        yield from look()


def _versions() -> Iterator[Finding]:
    python = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    supported = (3, 11) <= sys.version_info[:2] < (3, 14) and sys.platform == "linux"
    yield Finding(Verdict.OK if supported else Verdict.FAIL, "python", python)
    yield Finding(Verdict.OK, "moe-runtime", __version__)
    for name in DEPENDENCIES:
        try:
            yield Finding(Verdict.OK, name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(Verdict.FAIL, name, "not installed")


def _origins() -> Iterator[Finding]:
    """The packages have generic names: all must come from one place."""
    home = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        good = found == home / name
        yield Finding(Verdict.OK if good else Verdict.FAIL, f"package {name}", str(found))


def _compiled() -> Iterator[Finding]:
    """Loops in C; without them the same is done in Python."""
    home = Path(__file__).resolve().parents[1]
    if os.environ.get("MOE_RUNTIME_NATIVE") == "0":
        yield Finding(Verdict.NOTE, "compiled code", "turned off by MOE_RUNTIME_NATIVE=0: slower")
        return
    missing = [
        name
        for name in COMPILED
        if not any((home / f"{name}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
    ]
    if missing:
        detail = f"{', '.join(missing)} not built: slower; install with a C compiler"
        yield Finding(Verdict.NOTE, "compiled code", detail)
    else:
        yield Finding(Verdict.OK, "compiled code", "built")


def _extras() -> Iterator[Finding]:
    for module, extra, purpose in EXTRAS:
        present = importlib.util.find_spec(module) is not None
        verdict = Verdict.OK if present else Verdict.NOTE
        detail = f"{'present' if present else 'absent'}; extra [{extra}], for {purpose}"
        yield Finding(verdict, module, detail)
    for module, extra, purpose in PLANNED:
        detail = f"extra [{extra}] for {purpose}: planned, {__version__} does not use it"
        yield Finding(Verdict.NOTE, module, detail)


def _processors() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    verdict = Verdict.OK if usable >= 2 else Verdict.NOTE
    detail = f"{usable} usable; OMP_NUM_THREADS={threads or 'unset, workers get model.threads'}"
    yield Finding(verdict, "cores", detail)


def _memory() -> Iterator[Finding]:
    table = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")))
    available = int(table.get("MemAvailable", "0 kB").split()[0]) << 10
    verdict = Verdict.OK if available >= MEMORY_BYTES_MIN else Verdict.NOTE
    yield Finding(verdict, "memory", f"{available / 2**30:.1f} GiB available")


def _memfd() -> Iterator[Finding]:
    """What receive windows, KV pages and pool segments are made of."""
    try:
        descriptor = os.memfd_create("moe-runtime-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, PROBE_BYTES)
            os.pwrite(descriptor, b"x", PROBE_BYTES - 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        yield Finding(Verdict.FAIL, "memfd", f"no shareable memory: {error}")
    else:
        yield Finding(Verdict.OK, "memfd", "memory can be shared between processes")


def _huge_pages() -> Iterator[Finding]:
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    private, shared = (_chosen(folder / name) for name in ("enabled", "shmem_enabled"))
    detail = f"private memory: {private}, shared memory: {shared}"
    verdict = Verdict.NOTE if private == "never" else Verdict.OK
    yield Finding(verdict, "transparent huge pages", detail)
    table = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")))
    reserved = int(table.get("HugePages_Total", "0"))
    asked = bool(_lines(folder / "hpage_pmd_size")) and _release() >= COLLAPSE_RELEASE
    if reserved or (asked and shared != "deny") or shared in SHMEM_GIVES:
        detail = f"{reserved} reserved (vm.nr_hugepages), transparent ones where memory files ask"
        yield Finding(Verdict.OK, "shared huge pages", detail)
    else:
        detail = (
            "none: the pool lies in small pages, which costs copies and disks time; reserve some "
            "(vm.nr_hugepages), or set shmem_enabled to advise"
        )
        yield Finding(Verdict.NOTE, "shared huge pages", detail)


def _release() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(number) if number.isdecimal() else 0 for number in numbers)


def _process_memory() -> Iterator[Finding]:
    """By which memory that nobody can map is copied within a host."""
    scope = "".join(_lines(Path("/proc/sys/kernel/yama/ptrace_scope"))).strip() or "0"
    if scope == "0" or (os.geteuid() == 0 and scope != "3"):
        yield Finding(Verdict.OK, "process memory", "can be copied between processes of one user")
    else:
        detail = f"ptrace_scope is {scope}: memory that is not of allocate() goes by tcp in a host"
        yield Finding(Verdict.NOTE, "process memory", detail)


def _chosen(path: Path) -> str:
    """The word in brackets, as in `always [madvise] never`."""
    text = " ".join(_lines(path))
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _loopback() -> Iterator[Finding]:
    """A listener and a connection, as every link between processes begins."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=5) as client,
            listener.accept()[0] as server,
        ):
            client.sendall(b"x")
            answered = server.recv(1) == b"x"
    except OSError as error:
        yield Finding(Verdict.FAIL, "loopback", f"127.0.0.1 can't be used: {error}")
    else:
        verdict = Verdict.OK if answered else Verdict.FAIL
        yield Finding(verdict, "loopback", "127.0.0.1 accepts connections")


def _temporary_files() -> Iterator[Finding]:
    """Where `serve` keeps the secret of its run."""
    folder = tempfile.gettempdir()
    try:
        with tempfile.NamedTemporaryFile(prefix="moe-runtime-doctor-") as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding(Verdict.FAIL, "temporary files", f"{folder}: {error}")
    else:
        yield Finding(Verdict.OK, "temporary files", f"{folder}, {free / 2**30:.1f} GiB free")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


class DoctorGroup(click.Group):
    """Alone it examines the machine; `topology` is imported only to run, for torch comes along."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the one subcommand."""
        return ["topology"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand, or None if there is none of that name."""
        if cmd_name != "topology":
            return None
        from moe_runtime.doctor_topology import topology_command

        return topology_command


@click.group("doctor", cls=DoctorGroup, invoke_without_command=True)
@click.pass_context
def doctor_command(context: click.Context) -> None:
    """Say what works on this machine; exit 1 if the cluster can't run here.

    `doctor topology` shows its NICs, GPUs and rails.
    """
    if context.invoked_subcommand is not None:
        return
    failed = 0
    for finding in examine():
        failed += finding.verdict is Verdict.FAIL
        click.echo(f"{finding.verdict:<5} {finding.subject:<23} {finding.detail}")
    if failed:
        raise click.ClickException(f"{failed} of the above will keep moe-runtime from serving")
