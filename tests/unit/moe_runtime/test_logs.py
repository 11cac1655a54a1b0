"""The level of the log, from the environment."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from moe_runtime.cli import main


@pytest.mark.parametrize("command", ["serve", "launch"])
def test_a_level_that_is_none_is_refused_in_one_line(command: str) -> None:
    result = CliRunner(env={"MOE_RUNTIME_LOG": "loud"}).invoke(main, [command])
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    assert line == (
        "Error: MOE_RUNTIME_LOG = 'loud': expected one of debug, info, warning, error, critical"
    )
