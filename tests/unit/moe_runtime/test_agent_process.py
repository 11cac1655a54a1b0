"""The environment of the agent that `serve` starts."""

from __future__ import annotations

import os

from configs import load_config
from moe_runtime.agent_process import child_environment


def test_a_setting_in_the_environment_cannot_beat_the_effective_file() -> None:
    environ = dict(os.environ) | {"MOE_RUNTIME__CLUSTER__WORKERS": "3", "OTHER": "kept"}
    # The command line beats the environment here ...
    here = load_config("example", overrides=["cluster.workers=2"], environ=environ)
    assert here.cluster.workers == 2
    # ... so the child, which reads a file and no flags, must not see the variable.
    child = child_environment(environ)
    assert load_config("example", environ=environ).cluster.workers == 3
    assert load_config("example", environ=child).cluster.workers == 4
    assert child["OTHER"] == "kept"
