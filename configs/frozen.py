"""The base of every model of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of every model here: immutable, and a key that is not declared is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,  # sockets and condition variables take no infinite timeout
    )
