"""Configuration of moe-runtime: schema, presets and loader. Imports nothing of ours."""

from __future__ import annotations

from configs.errors import ConfigError, Problem
from configs.loader import LoadedConfig, load, load_config
from configs.schema import RuntimeConfig
from configs.sources import preset_names

__all__ = [
    "ConfigError",
    "LoadedConfig",
    "Problem",
    "RuntimeConfig",
    "load",
    "load_config",
    "preset_names",
]
