"""The command: `python -m moe_runtime`, and what the installed script calls."""

from __future__ import annotations

from typing import NoReturn


def start() -> NoReturn:
    """Be the command of this process; Ctrl-C ends it without a word, from its first import on."""
    try:
        from moe_runtime.cli import main

        main()
    except KeyboardInterrupt:
        from moe_runtime.process_end import INTERRUPTED

        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    start()
