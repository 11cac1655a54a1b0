"""Logging of the commands: one line per record, who said it, on standard error."""

from __future__ import annotations

import logging
import os

import click

LEVEL_VARIABLE = "MOE_RUNTIME_LOG"
LEVELS = ("debug", "info", "warning", "error", "critical")


def configure_logging(who: str) -> None:
    """Set up the root logger of a command; the level is MOE_RUNTIME_LOG (default INFO).

    Args:
        who: Process name in each line, such as "worker 2".

    Raises:
        click.UsageError: There is no such level.
    """
    level = os.environ.get(LEVEL_VARIABLE, "info")
    if level.lower() not in LEVELS:
        raise click.UsageError(f"{LEVEL_VARIABLE} = {level!r}: expected one of {', '.join(LEVELS)}")
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {who} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for noisy in ("httpx", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
