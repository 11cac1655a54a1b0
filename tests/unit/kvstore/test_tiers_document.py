"""The programs in the document of segments and tiers run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from configs.schema import KVStoreConfig

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore-tiers.md"


def pieces(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def test_the_program_runs(capsys):
    (program,) = pieces("python")
    exec(compile(program, str(DOCUMENT), "exec"), {})
    assert "2 blocks after a restart" in capsys.readouterr().out


def test_the_configuration_is_one():
    (text,) = pieces("yaml")
    lent = KVStoreConfig(**yaml.safe_load(text)["kvstore"]).lent
    assert [segment.medium for segment in lent] == ["dram", "cxl", "ssd"]
