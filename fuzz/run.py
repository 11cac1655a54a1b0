"""Run fuzz targets: `python -m fuzz.run TARGET... --seconds N`, one after the other.

The corpus starts from messages that the project's own encoders made. A finding is written to
`--findings`, and the exit code is not 0. Without atheris (a dev extra) the exit code is 77.

What takes longest is to instrument the code, so it is done once, and each target is a fork.
libFuzzer's own exit code for a finding is 77 too: it stays in the fork.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

TARGETS = ("handshake", "wire_requests", "wire_replies", "region_key", "control_frames")
SKIPPED = 77


def main() -> int:
    """Parse the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+", choices=TARGETS, metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    parser.add_argument("--corpus", type=Path, help="kept between runs; default: thrown away")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    chosen = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.stderr.write("atheris is not installed: nothing was fuzzed\n")
        return SKIPPED
    with atheris.instrument_imports(include=["transfer", "fuzz"]):
        for name in chosen.targets:
            importlib.import_module(f"fuzz.{name}")
    failed = [name for name in chosen.targets if not _survives(name, chosen)]
    if failed:
        sys.stderr.write(f"findings in {', '.join(failed)}: see {chosen.findings}\n")
    return int(bool(failed))


def _survives(name: str, chosen: argparse.Namespace) -> bool:
    sys.stderr.write(f"fuzzing {name}\n")
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="corpus-") as fresh:
        corpus = chosen.corpus / name if chosen.corpus else Path(fresh)
        if (pid := os.fork()) == 0:
            _fuzz(name, corpus, chosen.findings / name, chosen.seconds)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _fuzz(name: str, corpus: Path, findings: Path, seconds: int) -> None:
    """Fuzz in this process; libFuzzer ends it."""
    import atheris

    target = importlib.import_module(f"fuzz.{name}")
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(seed)
    # The peak that is compared is inherited from whoever has started us.
    rss_mb = 2048 + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    options = [
        sys.argv[0], str(corpus), f"-max_total_time={seconds}", "-max_len=4096",
        "-timeout=5", f"-rss_limit_mb={rss_mb}", f"-artifact_prefix={findings}/",
        "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup(options, reporting(target.run, findings))
    atheris.Fuzz()


def reporting(run: Callable[[bytes], None], findings: Path) -> Callable[[bytes], None]:
    """Return `run`, ended with the input in a file by the first exception that leaves it."""

    def run_one(data: bytes) -> None:
        try:
            run(data)
        except BaseException:  # noqa: BLE001 - whatever it is, it is the finding
            traceback.print_exc()
            finding = findings / f"raised-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"
            finding.write_bytes(data)
            sys.stderr.write(f"the input is in {finding}\n")
            sys.stderr.flush()
            os._exit(1)

    return run_one


if __name__ == "__main__":
    sys.exit(main())
