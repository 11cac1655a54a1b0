"""Precedence, paths, and messages of the configuration loader."""

from __future__ import annotations

import pickle
import textwrap
from pathlib import Path

import pytest

from configs import ConfigError, RuntimeConfig, load, load_config, preset_names
from configs.errors import Problem
from moe_runtime.options import ConfigRefused, load_from_options

ROOT = Path(__file__).resolve().parents[3]


def write(directory: Path, text: str, name: str = "mine.yaml") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def problems(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, Problem]:
    return {problem.name: problem for problem in error.value.problems}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_names_a_checkpoint_that_is_there(name: str) -> None:
    config = load_config(name, environ={})
    assert config.model.path.is_absolute()
    assert (config.model.path / "config.json").is_file()


def test_the_presets_are_these() -> None:
    assert preset_names() == ("example", "single", "tiny-test")


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        model: {path: somewhere}
        front: {port: 1001, host: file}
        scheduler:
          num_pages: 11
          max_running: 11
        """,
    )
    environ = {
        "MOE_RUNTIME__FRONT__PORT": "1002",
        "MOE_RUNTIME__SCHEDULER__NUM_PAGES": "12",
        "MOE_RUNTIME_TORCH": "not a setting: a single underscore",
    }
    loaded = load(path, overrides=["front.port=7", "front.port=1003"], environ=environ)
    assert loaded.config.front.port == 1003
    assert loaded.config.scheduler.num_pages == 12
    assert loaded.config.scheduler.max_running == 11
    assert loaded.config.scheduler.page_tokens == 16
    assert loaded.origins == {
        "model.path": "mine.yaml:2",
        "front.port": "--set front.port=1003",
        "front.host": "mine.yaml:3",
        "scheduler.num_pages": "environment MOE_RUNTIME__SCHEDULER__NUM_PAGES",
        "scheduler.max_running": "mine.yaml:6",
    }


def test_relative_paths_are_meant_from_where_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "model: {path: weights}\ncluster: {secret_file: key}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(path, environ={})
    assert config.model.path == tmp_path / "weights"
    assert config.cluster.secret_file == tmp_path / "key"
    flag = load_config(path, overrides=["model.path=w", "cluster.secret_file=null"], environ={})
    assert flag.model.path == elsewhere / "w"
    assert flag.cluster.secret_file is None
    assert load_config("example", environ={}).model.path == ROOT / "examples/tiny-moe"
    assert load_config("../mine.yaml", environ={}).model.path == elsewhere / "../weights"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        scheduler:
          token_budgt: 12
          num_pages: many
        fornt: {port: 80}
        kvstore: 3
        dispatch:
          pass_timeout_s: -1
        """,
    )
    with pytest.raises(ConfigError) as caught:
        load_config(
            path,
            overrides=["front.port=70000", "pages", "model.threads=0"],
            environ={"MOE_RUNTIME__CLUSTER__WORKER": "3"},
        )
    assert str(caught.value) == textwrap.dedent(
        """\
        10 problems in the configuration mine.yaml:
          (--set pages): expected section.key=value
          scheduler.token_budgt = 12 (mine.yaml:3): no such setting; \
did you mean scheduler.token_budget?
          fornt.port = 80 (mine.yaml:5): no such setting; did you mean front.port?
          kvstore = 3 (mine.yaml:6): a section, expected its keys below it
          cluster.worker = '3' (environment MOE_RUNTIME__CLUSTER__WORKER): no such setting; \
did you mean cluster.workers?
          scheduler.num_pages = 'many' (mine.yaml:4): expected an integer >= 2
          model.path: not set, expected a path
          model.threads = '0' (--set model.threads=0): expected an integer >= 1
          dispatch.pass_timeout_s = -1 (mine.yaml:8): expected a number > 0
          front.port = '70000' (--set front.port=70000): expected an integer >= 0 and <= 65535"""
    )
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.problems == caught.value.problems
    assert isinstance(copy, ValueError)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("front.port: true", "True"),
        ("front.port: '80'", "'80'"),
        ("transfer.backend: smoke", "'smoke'"),
        ("kvstore.enabled: maybe", "'maybe'"),
        ("model.path: null", "null"),
        ("elastic.install_timeout_s: .nan", "nan"),
        ("elastic.install_timeout_s: .inf", "inf"),
        ("elastic.install_timeout_s: [1]", "[1]"),
        ("front.host: ''", "''"),
        ("scheduler.max_context_tokens: 1", "1"),
    ],
)
def test_a_wrong_value_is_told_with_its_line(tmp_path: Path, written: str, value: str) -> None:
    name, _, text = written.partition(": ")
    section, _, key = name.partition(".")
    path = write(tmp_path, f"# first line\n{section}:\n  {key}: {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={}, overrides=[] if section == "model" else ["model.path=x"])
    assert problems(caught).keys() == {name}
    assert problems(caught)[name].origin == "mine.yaml:3"
    assert problems(caught)[name].seen == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  path: x\n  bad\n", "begins in line 3"),
        ("model:\n\tpath: x\n", "mine.yaml:2"),
        ("model: {path: x}\nmodel: {path: y}\n", "mine.yaml:2"),
        ("- model\n", "expected a mapping of sections"),
        ("model: {path: !!python/object:os.system x}", "mine.yaml:1"),
        ("", "model.path: not set"),
        ("model:\n", "model.path: not set"),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    assert expected in str(caught.value)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean tiny-test\? there are example, single"):
        load_config("tinytest", environ={})


def test_a_missing_or_binary_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config(tmp_path / "none.yaml", environ={})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "binary.yaml", environ={})


def test_words_for_null_only_where_null_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: x, served_name: y}")
    assert load_config(path, overrides=["model.served_name="], environ={}).model.served_name is None
    with pytest.raises(ConfigError):
        load_config(path, overrides=["front.port=null"], environ={})
    digits = load_config(path, overrides=["model.served_name=123"], environ={})
    assert digits.model.served_name == "123"


def test_a_loaded_configuration_is_immutable() -> None:
    config: RuntimeConfig = load_config("single", environ={})
    with pytest.raises(ValueError, match="frozen"):
        config.front.port = 1  # type: ignore[misc]


def test_workers_of_a_pool_with_tenants_say_for_whom_they_act(tmp_path: Path) -> None:
    """When the configuration is read, not when a worker starts."""
    token = tmp_path / "token"
    token.write_text("a token of sixteen bytes or more", encoding="utf-8")
    token.chmod(0o600)
    tenants = f'kvstore.tenants=[{{name: "a b", token_file: "{token}"}}]'
    with pytest.raises(ConfigError, match=r"kvstore.tenant must say which of \['a b'\]"):
        load_config("tiny-test", overrides=[tenants], environ={})
    chosen = load_config("tiny-test", overrides=[tenants, "kvstore.tenant=a b"], environ={})
    assert chosen.kvstore.tenant == "a b"
    # Masters elsewhere are started from such a file without a tenant of their own; workers are not.
    elsewhere = [tenants, 'kvstore.masters.addresses=["10.0.0.1:1"]']
    assert load_config("tiny-test", overrides=elsewhere, environ={}).kvstore.tenant is None
    options = {"config": "tiny-test", "overrides": elsewhere}
    assert load_from_options(options).kvstore.tenant is None
    with pytest.raises(ConfigRefused, match=r"kvstore.tenant must say"):
        load_from_options(options, for_workers=True)


def test_what_a_command_makes_no_use_of_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "store.yaml"
    path.write_text("kvstore: {segment_bytes: 1048576}")
    with pytest.raises(ConfigError, match="not set"):
        load_config(path, environ={})
    assert load_config(path, environ={}, unneeded=["model.path"]).kvstore.segment_bytes == 1 << 20
    path.write_text("model: {path: weights}")
    mine = load_config(path, environ={}, unneeded=["model.path"])
    assert mine.model.path == tmp_path / "weights"
