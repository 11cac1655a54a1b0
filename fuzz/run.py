"""Run one fuzz target: `python -m fuzz.run TARGET --seconds N`.

The corpus starts from messages that the project's own encoders made. A finding is written to
`--findings`, and the exit code is not 0. Without atheris (a dev extra) the exit code is 77.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import sys
import tempfile
from pathlib import Path

TARGETS = ("handshake", "wire_requests", "wire_replies", "region_key", "control_frames")
SKIPPED = 77


def main() -> int:
    """Parse the command line and fuzz; libFuzzer ends the process itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="kept between runs; default: thrown away")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    chosen = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.stderr.write("atheris is not installed: nothing was fuzzed\n")
        return SKIPPED
    with atheris.instrument_imports(include=["transfer", "fuzz"]):
        target = importlib.import_module(f"fuzz.{chosen.target}")
    with tempfile.TemporaryDirectory(prefix="corpus-") as fresh:
        corpus = chosen.corpus or Path(fresh)
        corpus.mkdir(parents=True, exist_ok=True)
        chosen.findings.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(target.seeds()):
            (corpus / f"seed-{i}").write_bytes(seed)
        # The peak that is compared is inherited from whoever has started us.
        rss_mb = 2048 + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        options = [
            sys.argv[0], str(corpus), f"-max_total_time={chosen.seconds}", "-max_len=4096",
            "-timeout=5", f"-rss_limit_mb={rss_mb}", f"-artifact_prefix={chosen.findings}/",
            "-print_final_stats=1",
        ]  # fmt: skip
        atheris.Setup(options, target.run)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
