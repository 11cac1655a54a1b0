"""The compiled part of transfer/, built with a sanitizer, and processes that use it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 60.0
# Run by every interpreter that finds it: `from transfer import _native` takes what is loaded.
LOADER = """\
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("transfer._native", {library!r})
module = importlib.util.module_from_spec(spec)
sys.modules["transfer._native"] = module
spec.loader.exec_module(module)
"""


@dataclass(frozen=True)
class Sanitizer:
    """How to build with one, and what its processes need.

    Attributes:
        flags: of the compiler.
        libraries: of the compiler, to be loaded before everything else.
        options: variables of the environment.
        wrapper: what starts its processes.
    """

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    options: dict[str, str]
    wrapper: tuple[str, ...] = ()


# Leaks are Python's and torch's own; those of the engine are counted elsewhere.
ADDRESS = Sanitizer(
    flags=("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    libraries=("libasan.so", "libubsan.so"),
    options={"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_segv=0",
             "PYTHONMALLOC": "malloc"},
)  # fmt: skip
# It knows no address space that is laid out at random.
THREAD = Sanitizer(
    flags=("-fsanitize=thread",),
    libraries=("libtsan.so",),
    options={"TSAN_OPTIONS": "report_signal_unsafe=0:exitcode=66"},
    wrapper=("setarch", "-R"),
)


class Sanitized:
    """One build in a directory of its own; skips the test where it cannot be built."""

    def __init__(self, sanitizer: Sanitizer, directory: Path) -> None:
        self._sanitizer = sanitizer
        self._directory = directory
        include = Path(sysconfig.get_paths()["include"])
        if not (include / "Python.h").exists():
            pytest.skip(f"no sanitizer build: there is no {include}/Python.h")
        preload = [self._find(name) for name in sanitizer.libraries]
        library = directory / "_native.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer",
                   *sanitizer.flags, f"-I{include}", str(ROOT / "transfer/native.c"),
                   "-o", str(library)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
        assert done.returncode == 0, done.stderr
        (directory / "sitecustomize.py").write_text(LOADER.format(library=str(library)))
        self._environment = {
            **os.environ,
            **sanitizer.options,
            "LD_PRELOAD": " ".join(preload),
            "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        self._environment.pop("MOE_RUNTIME_NATIVE", None)

    def python(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with the build; standard error is with standard output."""
        return subprocess.run(
            [*self._sanitizer.wrapper, sys.executable, *arguments], cwd=ROOT, text=True,
            env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    @staticmethod
    def _find(name: str) -> str:
        try:
            found = subprocess.run(
                ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, timeout=10,
                check=True,
            ).stdout.strip()  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no sanitizer build: no gcc ({error})")
        if not Path(found).is_absolute():
            pytest.skip(f"no sanitizer build: gcc has no {name}")
        return found
