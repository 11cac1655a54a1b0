"""From sources to a checked `RuntimeConfig`.

    defaults  <  preset or file  <  environment  <  command line        (the right one wins)

A command that needs no model gives what stands for settings that only others require.

All problems are found before any is told: one `ConfigError` lists them, a line each.
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.errors import ConfigError, Problem
from configs.fields import Setting, sections, settings
from configs.schema import RuntimeConfig
from configs.sources import (
    Entry,
    document_entries,
    environment_entries,
    flag_entries,
    open_document,
)

NULL_WORDS = ("", "null", "none", "~")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration, and where each value that is not a default came from."""

    config: RuntimeConfig
    origins: Mapping[str, str]


def load_config(
    preset_or_path: str | Path,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    unneeded: Sequence[str] = (),
) -> RuntimeConfig:
    """Load a preset (by name) or a YAML file (by path) with its overrides.

    Args:
        preset_or_path: `example`, or a path (`./mine.yaml`). A relative path inside a file is
            meant from that file's directory; inside a preset from the repository; in the
            environment and on the command line from the working directory.
        overrides: `section.key=value`, as given to `--set`; the last one wins.
        environ: Variables `MOE_RUNTIME__SECTION__KEY` are read.
        unneeded: Required paths that the caller makes no use of: they may be missing.

    Raises:
        ConfigError: Lists everything that is wrong.
    """
    return load(preset_or_path, overrides=overrides, environ=environ, unneeded=unneeded).config


def load(
    preset_or_path: str | Path,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    unneeded: Sequence[str] = (),
) -> LoadedConfig:
    """Like `load_config`, and tell the origin of each value.

    Raises:
        ConfigError: Lists everything that is wrong.
    """
    document = open_document(preset_or_path)
    flags, problems = flag_entries(overrides)
    missing = [Entry(name=n, value="none", origin="unneeded", base=Path()) for n in unneeded]
    entries = [*missing, *document_entries(document), *environment_entries(environ), *flags]
    problems.extend(_unknown(entry) for entry in entries if entry.name not in settings())
    chosen = {entry.name: entry for entry in entries if entry.name in settings()}
    values, refused = _values(chosen.values())
    problems.extend(refused)
    config = _validate(values, chosen, problems, skip={problem.name for problem in refused})
    if config is None or problems:
        raise ConfigError(document.name, tuple(problems))
    origins = {name: entry.origin for name, entry in chosen.items()}
    return LoadedConfig(config=config, origins=origins)


def _unknown(entry: Entry) -> Problem:
    """An entry that no setting has the name of, with the nearest one that exists."""
    expected = "no such setting"
    if entry.name in sections():
        expected = "a section, expected its keys below it"
    elif near := _nearest(entry.name):
        expected = f"no such setting; did you mean {near}?"
    return Problem(
        name=entry.name, origin=entry.origin, seen=_written(entry.value), expected=expected
    )


def _nearest(name: str) -> str | None:
    """The most similar full name, else the setting with the most similar last word."""
    if found := difflib.get_close_matches(name, settings(), n=1, cutoff=0.75):
        return found[0]
    last_words = {known.rpartition(".")[2]: known for known in settings()}
    if found := difflib.get_close_matches(name.rpartition(".")[2], last_words, n=1, cutoff=0.75):
        return last_words[found[0]]
    found = difflib.get_close_matches(name, settings(), n=1, cutoff=0.5)
    return found[0] if found else None


def _values(entries: Iterable[Entry]) -> tuple[dict[str, Any], list[Problem]]:
    """Nested values for the schema, paths made absolute."""
    nested: dict[str, Any] = {}
    problems: list[Problem] = []
    for entry in entries:
        setting = settings()[entry.name]
        if _is_wrong_type(setting, entry):
            problems.append(_refusal(setting, entry))
            continue
        *parents, key = entry.name.split(".")
        table = nested
        for parent in parents:
            table = table.setdefault(parent, {})
        table[key] = _meaning(setting, entry)
    return nested, problems


def _is_wrong_type(setting: Setting, entry: Entry) -> bool:
    # An empty address would mean every interface, an empty path the working directory.
    if entry.value == "" and setting.kind in (str, Path) and not setting.optional:
        return True
    # pydantic takes true for 1 and "4" for 4; in a file that is a slip worth telling.
    is_number = setting.kind in (int, float)
    return not entry.is_text and is_number and isinstance(entry.value, bool | str)


def _meaning(setting: Setting, entry: Entry) -> Any:
    value = entry.value
    if entry.is_text and setting.optional and value.strip().lower() in NULL_WORDS:
        return None
    if setting.kind is Path and isinstance(value, str) and value:
        return entry.base / Path(value).expanduser()
    if entry.is_text and typing.get_origin(setting.kind) is tuple:
        return _list(value)
    return value


def _list(text: str) -> Any:
    """Read `a, b` or `["a", "b"]` from the environment or a flag."""
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # refused with what was expected


def _validate(
    values: dict[str, Any], chosen: Mapping[str, Entry], problems: list[Problem], skip: set[str]
) -> RuntimeConfig | None:
    """Validate, and turn each of pydantic's errors into one of ours (in place)."""
    try:
        return RuntimeConfig.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = ".".join(str(part) for part in detail["loc"])
            missing = [
                s for s in settings().values() if s.required and f"{s.name}.".startswith(f"{name}.")
            ]
            if detail["type"] == "missing":
                problems.extend(_missing(s) for s in missing if s.name not in skip)
            elif detail["type"] == "value_error":
                origin = chosen[name].origin if name in chosen else ""
                seen = _written(chosen[name].value) if name in chosen else ""
                expected = str(detail["ctx"]["error"])
                problems.append(Problem(name=name, origin=origin, seen=seen, expected=expected))
            elif name in chosen:
                problems.append(_refusal(settings()[name], chosen[name]))
            else:
                seen = _written(detail["input"])
                problems.append(Problem(name=name, origin="", seen=seen, expected=detail["msg"]))
    return None


def _missing(setting: Setting) -> Problem:
    expected = f"not set, expected {setting.expected}"
    return Problem(name=setting.name, origin="", seen="", expected=expected)


def _refusal(setting: Setting, entry: Entry) -> Problem:
    return Problem(
        name=setting.name,
        origin=entry.origin,
        seen=_written(entry.value),
        expected=f"expected {setting.expected}",
    )


def _written(value: object) -> str:
    """A value for a message: one line, quoted if it is text, cut if it is long."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
