"""`moe-runtime config`: exit codes and what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from configs import RuntimeConfig, load_config
from moe_runtime.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MOE_RUNTIME__")]:
        monkeypatch.delenv(name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["config", *arguments])


def test_show_prints_yaml_that_loads_to_the_same(tmp_path: Path) -> None:
    result = run("show", "--set", "front.port=9000")
    assert result.exit_code == 0
    assert "  port: 9000  # --set front.port=9000\n" in result.output
    assert "  workers: 4  # preset example:" in result.output
    path = tmp_path / "shown.yaml"
    path.write_text(result.output, encoding="utf-8")
    expected = load_config("example", overrides=["front.port=9000"], environ={})
    assert load_config(path, environ={}) == expected


def test_check_says_what_it_checked() -> None:
    result = run("check", "--config", "single")
    assert result.exit_code == 0
    assert result.output == f"ok: {ROOT / 'examples/tiny-moe'}, 1 workers\n"


def test_a_file_for_the_store_alone_needs_no_model(tmp_path: Path) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("kvstore: {segments: [{bytes: 65536}], masters: {addresses: ['h:1', 'h:2']}}")
    result = run("check", "--config", str(file), "--store-only")
    assert result.exit_code == 0
    assert result.output == "ok: masters: 2; a node lends dram of 65536 bytes\n"
    assert "addresses" in run("show", "--config", str(file), "--store-only").output
    assert "model.path: not set" in run("check", "--config", str(file)).stderr


def test_check_lists_problems_and_exits_with_2() -> None:
    result = run("check", "--set", "front.prot=1", "--set", "cluster.workers=0")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "Error: 2 problems in the configuration preset example:",
        "  front.prot = '1' (--set front.prot=1): no such setting; did you mean front.port?",
        "  cluster.workers = '0' (--set cluster.workers=0): expected an integer >= 1 and <= 1024",
    ]


def test_check_misses_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    result = run("check", "--set", f"model.path={tmp_path}")
    assert result.exit_code == 2
    assert f"model.path = {tmp_path}: no checkpoint" in result.stderr


def test_schema_is_json_schema_of_all_sections() -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert json.loads(result.output)["properties"].keys() == RuntimeConfig.model_fields.keys()


def test_configuration_page_is_up_to_date() -> None:
    result = run("schema", "--format", "markdown")
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == result.output, "run `make docs`"


def test_an_unknown_command_exits_with_2() -> None:
    assert CliRunner().invoke(main, ["sevre"]).exit_code == 2


def test_config_needs_neither_torch_nor_the_server() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from moe_runtime.cli import main; "
        "r = CliRunner().invoke(main, ['config', 'show']); "
        "sys.exit(f'{r.exit_code} torch={\"torch\" in sys.modules}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.strip() == "0 torch=False"


def test_the_presets_are_plain_yaml_without_surprises() -> None:
    for path in sorted((ROOT / "configs/presets").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert set(values) <= set(RuntimeConfig.model_fields), path


def test_every_command_has_help_without_being_loaded() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    listed = [name for name in COMMANDS if f"  {name} " in result.output]
    assert "config" in listed
