"""Where values come from: a preset or a file, the environment, the command line.

Each source becomes a list of entries `dotted name -> value` that remember their origin. Nothing
is validated here but the form of the source itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from configs.errors import ConfigError, Problem
from configs.fields import sections

PREFIX = "MOE_RUNTIME__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value, as a source gave it.

    Attributes:
        name: Dotted name, not yet known to exist.
        value: YAML value of a file; plain text from the environment and the command line.
        origin: For messages: `example.yaml:12`, `environment MOE_RUNTIME__A__B`, `--set a.b=c`.
        base: Directory that a relative path is meant against.
        is_text: The value is text, whose meaning depends on the setting.
    """

    name: str
    value: Any
    origin: str
    base: Path
    is_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The text of a configuration file or preset."""

    name: str
    text: str
    base: Path


def preset_names() -> tuple[str, ...]:
    """Names of the presets that are installed."""
    names = (entry.name for entry in (resources.files("configs") / "presets").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def open_document(preset_or_path: str | Path) -> Document:
    """Read a preset by its name, or a file by its path (anything with a `/` or a `.yaml`).

    Raises:
        ConfigError: There is no such preset or file, or it is not UTF-8 text.
    """
    name = str(preset_or_path)
    if isinstance(preset_or_path, str) and "/" not in name and not name.endswith((".yaml", ".yml")):
        return _open_preset(name)
    path = Path(preset_or_path).expanduser().absolute()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(name, (_about_source(f"can't be read: {reason}"),)) from error
    return Document(name=path.name, text=text, base=path.parent)


def _open_preset(name: str) -> Document:
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        problem = f"no such preset; {hint}there are {', '.join(names)} (a file needs a / or .yaml)"
        raise ConfigError(name, (_about_source(problem),))
    text = (resources.files("configs") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    # A preset's paths are meant from the top of the repository, where examples/ lies.
    return Document(name=f"preset {name}", text=text, base=Path(__file__).parent.parent.absolute())


def document_entries(document: Document) -> list[Entry]:
    """Values of a YAML document with their lines.

    Raises:
        ConfigError: Not YAML, not a mapping of mappings, or a key that comes twice.
    """
    try:
        root = yaml.compose(document.text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(document.name, (_yaml_problem(document, error),)) from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag.endswith(":null")):
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(document.name, (_about_source("expected a mapping of sections"),))
    problems: list[Problem] = []
    entries = list(_walk(document, root, "", problems))
    if problems:
        raise ConfigError(document.name, tuple(problems))
    return entries


def _walk(
    document: Document, node: yaml.MappingNode, prefix: str, problems: list[Problem]
) -> Iterator[Entry]:
    loader = yaml.SafeLoader("")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        name = f"{prefix}{key}"
        origin = f"{document.name}:{key_node.start_mark.line + 1}"
        if key in seen:
            problems.append(Problem(name=name, origin=origin, seen="", expected="given twice"))
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode):
            yield from _walk(document, value_node, f"{name}.", problems)
            continue
        try:
            value = loader.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            problems.append(_yaml_problem(document, error))
            continue
        if value is None and name in sections():
            continue  # a section with all of its keys commented out
        yield Entry(name=name, value=value, origin=origin, base=document.base)


def _yaml_problem(document: Document, error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        origin = f"{document.name}:{mark.line + 1}, column {mark.column + 1}"
        problem = error.problem or error.context or "not understood"
        # Only the context knows where an unfinished key or bracket began.
        if error.problem and error.context and error.context_mark is not None:
            problem += f" {error.context} that begins in line {error.context_mark.line + 1}"
    else:
        origin, problem = document.name, " ".join(str(error).split())
    return Problem(name="", origin=origin, seen="", expected=f"not valid YAML: {problem}")


def _about_source(expected: str) -> Problem:
    return Problem(name="", origin="", seen="", expected=expected)


def environment_entries(environ: Mapping[str, str]) -> list[Entry]:
    """Values of variables `MOE_RUNTIME__SECTION__KEY`, in the order of their names."""
    return [
        Entry(
            name=variable.removeprefix(PREFIX).lower().replace("__", "."),
            value=value,
            origin=f"environment {variable}",
            base=Path.cwd(),
            is_text=True,
        )
        for variable, value in sorted(environ.items())
        if variable.startswith(PREFIX)
    ]


def flag_entries(overrides: Sequence[str]) -> tuple[list[Entry], list[Problem]]:
    """Values of `section.key=value` arguments, and what is wrong with the others."""
    entries: list[Entry] = []
    problems: list[Problem] = []
    for override in overrides:
        name, equals, value = override.partition("=")
        origin = f"--set {override}"
        if not equals or not name.strip():
            expected = "expected section.key=value"
            problems.append(Problem(name="", origin=origin, seen="", expected=expected))
            continue
        entries.append(
            Entry(name=name.strip(), value=value, origin=origin, base=Path.cwd(), is_text=True)
        )
    return entries, problems
