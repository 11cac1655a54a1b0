"""Administration of the KV store over HTTP: who may ask, and where."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from configs.certificates import check_certificates, check_pair, check_readable
from configs.frozen import Frozen


class KVAdminConfig(Frozen):
    """The administration service of the KV store: status, blocks, drains, metrics over HTTP."""

    enabled: bool = Field(False, description="Serve the store's administration over HTTP.")
    host: str = Field(
        "127.0.0.1", description="Address to listen on; beyond loopback only with certificates."
    )
    port: int = Field(9003, ge=0, le=65535, description="0 picks a free port.")
    token_file: Path | None = Field(
        None,
        description="File with the bearer token of administrators (16 bytes or more), which only"
        " its owner can read; needed to enable the service.",
    )
    certificate: Path | None = Field(
        None, description="PEM file with the service's certificate, and its chain."
    )
    private_key: Path | None = Field(
        None, description="PEM file with the key of that certificate, without a password."
    )
    open_metrics: bool = Field(False, description="Give /metrics to those without the token too.")

    @field_validator("certificate")
    @classmethod
    def _holds_certificates(cls, path: Path | None) -> Path | None:
        return path if path is None else check_certificates(path)

    @field_validator("private_key", "token_file")
    @classmethod
    def _is_readable(cls, path: Path | None) -> Path | None:
        return path if path is None else check_readable(path)

    @model_validator(mode="after")
    def _keeps_the_token_secret(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key: both, or none")
        if self.certificate is not None and self.private_key is not None:
            check_pair(self.certificate, self.private_key)
        if not self.enabled:
            return self
        if self.token_file is None:
            raise ValueError("token_file is needed: nobody else may drain nodes")
        if self.certificate is None and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} is not loopback: the token would travel in the clear; name"
                " certificate and private_key"
            )
        return self


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
