"""What settings exist: the schema as a flat table of dotted names.

The loader, its messages, and the documentation all read this table, so none of them can drift
from the schema.
"""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Union

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.schema import RuntimeConfig

_NOUNS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    tuple[str, ...]: "a list of texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One knob.

    Attributes:
        name: Dotted name, `section.key`.
        kind: Python type of the value, without `None`.
        optional: `None` is allowed.
        required: There is no default.
        default: The default; meaningless if required.
        expected: The allowed values in words.
        description: What it does, or "".
    """

    name: str
    kind: Any
    optional: bool
    required: bool
    default: Any
    expected: str
    description: str


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted name, in the order of the schema."""
    return {setting.name: setting for setting in _walk(RuntimeConfig, "")}


@functools.cache
def sections() -> dict[str, type[BaseModel]]:
    """The model behind every section name."""
    return {
        name: field.annotation
        for name, field in RuntimeConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _walk(model: type[BaseModel], prefix: str) -> list[Setting]:
    found: list[Setting] = []
    for key, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.extend(_walk(annotation, f"{prefix}{key}."))
        else:
            found.append(_setting(f"{prefix}{key}", field))
    return found


def _setting(name: str, field: FieldInfo) -> Setting:
    members = typing.get_args(field.annotation)
    is_union = typing.get_origin(field.annotation) in (Union, types.UnionType)
    optional = is_union and types.NoneType in members
    kind = next(m for m in members if m is not types.NoneType) if optional else field.annotation
    if typing.get_origin(kind) is tuple:
        kind = _without_bounds(kind)
    return Setting(
        name=name,
        kind=kind,
        optional=optional,
        required=field.is_required(),
        default=None if field.is_required() else field.default,
        expected=_expected(kind, field, optional=optional),
        description=field.description or "",
    )


def _without_bounds(kind: Any) -> Any:
    """A list of texts whose lengths are bounded is read as any list of texts."""
    member: Any = typing.get_args(kind)[0]
    if typing.get_origin(member) is typing.Annotated:
        member = typing.get_args(member)[0]
    return types.GenericAlias(tuple, (member, ...))


def _expected(kind: Any, field: FieldInfo, *, optional: bool) -> str:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        words = "one of " + ", ".join(member.value for member in kind)
    else:
        words = " ".join([_noun(kind), _bounds(field.metadata)]).strip()
    return f"{words}, or null" if optional else words


def _noun(kind: Any) -> str:
    members = typing.get_args(kind)
    if members and isinstance(members[0], type) and issubclass(members[0], BaseModel):
        return f"a list of {{{', '.join(members[0].model_fields)}}}"
    return _NOUNS.get(kind, str(kind))


def _bounds(metadata: list[Any]) -> str:
    parts = []
    for bound in metadata:
        match bound:
            case annotated_types.Ge(ge=value):
                parts.append(f">= {value}")
            case annotated_types.Gt(gt=value):
                parts.append(f"> {value}")
            case annotated_types.Le(le=value):
                parts.append(f"<= {value}")
            case annotated_types.Lt(lt=value):
                parts.append(f"< {value}")
    return " and ".join(parts)
