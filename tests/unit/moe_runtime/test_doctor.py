"""`moe-runtime doctor`: true on this machine, and it fails when something is really missing."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import moe_runtime
from moe_runtime import doctor
from moe_runtime.cli import main

ROOT = Path(moe_runtime.__file__).resolve().parents[1]


def report() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_this_machine_is_good_enough() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    assert result.stderr == ""


def test_what_it_says_is_true() -> None:
    found = report()
    assert found["torch"].detail == importlib.metadata.version("torch")
    assert found["package dispatch"].detail == str(ROOT / "dispatch")
    assert found["cores"].detail.startswith(f"{len(os.sched_getaffinity(0))} usable")
    assert set(found) >= {"memory", "memfd", "transparent huge pages", "loopback"}
    for name, extra, _ in doctor.EXTRAS + doctor.PLANNED:
        assert f"[{extra}]" in found[name].detail


def test_extras_are_those_of_the_project() -> None:
    metadata = importlib.metadata.metadata("moe-runtime")
    extras = set(metadata.get_all("Provides-Extra") or ()) - {"dev"}
    assert {extra for _, extra, _ in doctor.EXTRAS + doctor.PLANNED} == extras


def test_no_memfd_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "FAIL  memfd" in result.output
    assert result.stderr == "Error: 1 of the above will keep moe-runtime from serving\n"


def test_a_foreign_package_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore/__init__.py").touch()
    monkeypatch.delitem(sys.modules, "kvstore", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    finding = report()["package kvstore"]
    assert finding.verdict is doctor.Verdict.FAIL
    assert finding.detail == str(tmp_path / "kvstore")


def test_looking_leaves_nothing_open() -> None:
    list(doctor.examine())
    before = set(os.listdir("/proc/self/fd"))
    list(doctor.examine())
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_is_not_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_RUNTIME_NATIVE", raising=False)
    monkeypatch.setattr(doctor, "COMPILED", ("transfer/_none", "kvstore/_neither"))
    finding = report()["compiled code"]
    assert finding.verdict is doctor.Verdict.NOTE
    assert finding.detail.startswith("transfer/_none, kvstore/_neither not built")
    monkeypatch.setenv("MOE_RUNTIME_NATIVE", "0")
    assert "MOE_RUNTIME_NATIVE=0" in report()["compiled code"].detail


@pytest.mark.parametrize(
    ("files", "subject", "verdict"),
    [
        ({"shmem_enabled": "always within_size [advise] never"}, "shared huge pages", "ok"),
        ({"meminfo": "HugePages_Total: 7"}, "shared huge pages", "ok"),
        ({"shmem_enabled": "[never]"}, "shared huge pages", "note"),
        ({"shmem_enabled": "[never]", "hpage_pmd_size": "2097152"}, "shared huge pages", "ok"),
        ({"shmem_enabled": "[deny]", "hpage_pmd_size": "2097152"}, "shared huge pages", "note"),
        ({"enabled": "always madvise [never]"}, "transparent huge pages", "note"),
        ({"ptrace_scope": "3"}, "process memory", "note"),
        ({"ptrace_scope": "0"}, "process memory", "ok"),
        ({"ptrace_scope": ""}, "process memory", "ok"),
    ],
)
def test_what_costs_time_is_told(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], subject: str, verdict: str
) -> None:
    files = {"meminfo": "MemAvailable: 9 kB", **files}
    monkeypatch.setattr(doctor, "_lines", lambda path: files.get(path.name, "").splitlines())
    monkeypatch.setattr(doctor, "_release", lambda: (6, 1))
    assert report()[subject].verdict == verdict


def test_compiled_code_is_what_is_built() -> None:
    pattern = r'Extension\(\s*"([\w.]+)"'
    names = re.findall(pattern, (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert {name.replace(".", "/") for name in names} == set(doctor.COMPILED)
