"""Any valid configuration survives being written and read, from a file and from flags."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import RuntimeConfig, load_config
from configs.fields import Setting
from configs.fields import settings as known_settings
from configs.render import to_yaml

# What has to name real files, or goes with other settings, is tested with those.
DEPENDENT = (
    *("transfer.tls.", "kvstore.admin.", "kvstore.masters.", "kvstore.tenant", "kvstore.segments"),
    *("kvstore.policies.tiers.demotion", "dispatch.microbatch"),
)
ENDPOINT = st.sampled_from(["tcp://127.0.0.1:*", "tcp://[::1]:5557", "ipc:///m/events"])
# Surrogates are no text; line ends and other controls are not part of a one-line value.
TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)
PATH = st.text("abcXYZ09 -_.é#:'\"", min_size=1, max_size=12).map(lambda text: Path("/m") / text)


def bounds(setting: Setting) -> tuple[float, float, bool, bool]:
    *parents, key = setting.name.split(".")
    model: Any = RuntimeConfig
    for parent in parents:
        model = model.model_fields[parent].annotation
    low, high, above, below = -1000.0, 1e9, False, False
    for bound in model.model_fields[key].metadata:
        match bound:
            case annotated_types.Ge(ge=value):
                low = value
            case annotated_types.Gt(gt=value):
                low, above = value, True
            case annotated_types.Le(le=value):
                high = value
            case annotated_types.Lt(lt=value):
                high, below = value, True
    return float(low), float(high), above, below


def values(setting: Setting) -> st.SearchStrategy[Any]:
    low, high, above, below = bounds(setting)
    if setting.name.endswith("endpoint"):
        strategy: st.SearchStrategy[Any] = ENDPOINT
    elif setting.kind is bool:
        strategy = st.booleans()
    elif setting.kind is int:
        strategy = st.integers(int(low), int(high))
    elif setting.kind is float:
        strategy = st.floats(low, high, exclude_min=above, exclude_max=below)
    elif setting.kind is Path:
        strategy = PATH
    elif isinstance(setting.kind, type) and issubclass(setting.kind, StrEnum):
        strategy = st.sampled_from(list(setting.kind))
    elif setting.kind == tuple[str, ...]:
        strategy = st.lists(TEXT, max_size=3).map(tuple)
    else:
        # Words that mean null are the documented exception for optional text.
        strategy = TEXT.filter(lambda text: text.strip().lower() not in ("", "null", "none", "~"))
    return st.none() | strategy if setting.optional else strategy


@st.composite
def configurations(draw: st.DrawFn) -> RuntimeConfig:
    nested: dict[str, Any] = {}
    for name, setting in known_settings().items():
        if name.startswith(DEPENDENT):
            continue
        *parents, key = name.split(".")
        if setting.required or draw(st.booleans()):
            table = nested
            for parent in parents:
                table = table.setdefault(parent, {})
            table[key] = draw(values(setting))
    return RuntimeConfig.model_validate(nested)


@given(config=configurations())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_round_trips(tmp_path: Path, config: RuntimeConfig) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path, environ={}) == config


@pytest.mark.parametrize("topic", ["\xa0@", "\u3000#a", "a\u2028", " ", "\ufeffa: b"])
def test_invisible_characters_are_written_as_escapes(tmp_path: Path, topic: str) -> None:
    path = tmp_path / "config.yaml"
    nested = {"model": {"path": "/m"}, "kvstore": {"events": {"topic": topic}}}
    config = RuntimeConfig.model_validate(nested)
    path.write_text(to_yaml(config), encoding="utf-8")
    assert path.read_text(encoding="utf-8").isascii()
    assert load_config(path, environ={}) == config


def flags_of(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flags_of(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
            yield f"{prefix}{key}={text.strip()}"
        else:
            yield f"{prefix}{key}={'null' if value is None else value}"


@given(config=configurations())
@settings(max_examples=60)
def test_flags_round_trip_and_win(config: RuntimeConfig) -> None:
    flags = list(flags_of(config.model_dump(mode="json"), ""))
    environ = {"MOE_RUNTIME__FRONT__PORT": "1", "MOE_RUNTIME__MODEL__PATH": "/elsewhere"}
    assert load_config("tiny-test", overrides=flags, environ=environ) == config


HOSTS = st.integers(1, 65535).map(lambda port: f"10.0.0.{port % 250}:{port}")
SEGMENTS = st.one_of(
    st.fixed_dictionaries({"medium": st.just("dram"), "bytes": st.integers(1 << 20, 1 << 40)}),
    st.fixed_dictionaries(
        {
            "medium": st.just("ssd"),
            "bytes": st.integers(1 << 20, 1 << 40),
            "path": st.uuids().map(lambda name: f"/m/{name}"),
        }
    ),
)


@st.composite
def stores(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of the store that are valid only together; `TOKEN` stands for a real file."""
    low, high = sorted(draw(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2, unique=True)))
    names = draw(st.lists(TEXT.map(str.strip).filter(bool), max_size=3, unique=True))
    store: dict[str, Any] = {
        "segments": draw(st.lists(SEGMENTS, max_size=3)),
        "tenants": [{"name": name, "token_file": "TOKEN", "quota_bytes": 7} for name in names],
        "policies": {"tiers": {"demotion_low": low, "demotion_high": high}},
    }
    if names:
        store["tenant"] = draw(st.sampled_from(names))
    if draw(st.booleans()):
        store["masters"] = {"addresses": draw(st.lists(HOSTS, max_size=3, unique=True))}
    else:
        etcd = {"endpoints": ["http://10.0.0.1:2379"], "prefix": "/a/b"}
        store["masters"] = {"etcd": etcd, "shards": draw(st.integers(1, 64))}
    return store


@given(store=stores())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_settings_that_go_together(tmp_path: Path, store: dict[str, Any]) -> None:
    token = tmp_path / "token"
    token.write_text("a token of sixteen bytes or more", encoding="utf-8")
    token.chmod(0o600)
    for tenant in store["tenants"]:
        tenant["token_file"] = str(token)
    store["admin"] = {"enabled": True, "token_file": str(token)}
    dispatch = {"microbatches": 3, "microbatch_tokens": 5}
    nested = {"model": {"path": "/m"}, "kvstore": store, "dispatch": dispatch}
    config = RuntimeConfig.model_validate(nested)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path, environ={}) == config
    flags = list(flags_of(config.model_dump(mode="json"), ""))
    assert load_config("tiny-test", overrides=flags, environ={}) == config


@given(name=st.sampled_from(sorted(known_settings())), position=st.integers(0, 100))
def test_a_typo_is_traced_to_the_name_that_was_meant(name: str, position: int) -> None:
    at = name.index(".") + 1 + position % (len(name) - name.index(".") - 1)
    typo = f"{name[:at]}{name[at + 1 :]}"
    if typo in known_settings() or len(name) - name.index(".") < 5:
        return
    with pytest.raises(ValueError, match="no such setting; did you mean") as caught:
        load_config("tiny-test", overrides=[f"{typo}=1"], environ={})
    assert f"did you mean {name}?" in str(caught.value)
