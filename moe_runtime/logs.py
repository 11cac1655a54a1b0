"""Logging of the commands: one line per record, who said it, on standard error."""

from __future__ import annotations

import logging
import os


def configure_logging(who: str) -> None:
    """Set up the root logger of a command; the level is MOE_RUNTIME_LOG (default INFO).

    Args:
        who: Process name in each line, such as "worker 2".
    """
    logging.basicConfig(
        level=os.environ.get("MOE_RUNTIME_LOG", "INFO").upper(),
        format=f"%(asctime)s {who} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for noisy in ("httpx", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
