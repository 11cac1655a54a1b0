"""The training text of the example model: Jane Austen's six novels, from a Debian package.

The package `r-cran-janeaustenr` (MIT; the novels are in the public domain) holds them as R
data. `apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr*.deb DIRECTORY` is
enough, R is not needed.

    Rdata.rdb = chunk*         chunk = uint32 (big endian, size inflated) | zlib stream
    inflated  = header | STRSXP flags, count | (CHARSXP flags, length, bytes)*
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

RDB = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
HELD_OUT_EVERY = 20
SPEECH_CHARS_MAX = 600
STRING_VECTOR = 16
NOT_AVAILABLE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Chapters as lists of paragraphs; held-out chapters appear nowhere else."""

    train: tuple[tuple[str, ...], ...]
    held_out: tuple[tuple[str, ...], ...]


def read_corpus(root: Path) -> Corpus:
    """Read the novels below `root`; every twentieth chapter is held out.

    Args:
        root: Where the Debian package was unpacked (`/` if it is installed).
    """
    chapters = [
        chapter
        for book in _inflate((root / RDB).read_bytes())
        for chapter in _chapters(_strings(book))
    ]
    return Corpus(
        train=tuple(c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY != 7),
        held_out=tuple(c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY == 7),
    )


def conversations(chapter: tuple[str, ...]) -> list[list[str]]:
    """Runs of at least two paragraphs in a row that begin with speech, cut to what is said."""
    runs: list[list[str]] = [[]]
    for paragraph in chapter:
        if paragraph.startswith('"') and len(paragraph) <= SPEECH_CHARS_MAX:
            runs[-1].append(" ".join(re.findall(r'"([^"]+)', paragraph)[::2]))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) >= 2]


def _inflate(raw: bytes) -> list[bytes]:
    chunks = []
    position = 0
    while position < len(raw):
        (size,) = struct.unpack_from(">I", raw, position)
        stream = zlib.decompressobj()
        chunk = stream.decompress(raw[position + 4 :])
        if len(chunk) != size:
            raise ValueError(f"chunk at {position}: {len(chunk)} bytes, header says {size}")
        chunks.append(chunk)
        position = len(raw) - len(stream.unused_data)
    return chunks


def _strings(chunk: bytes) -> list[str]:
    """Strings of one serialised character vector (XDR, format version 3)."""
    if chunk[:2] != b"X\n":
        raise ValueError(f"not an XDR serialisation: {chunk[:8]!r}")
    version, _, _, encoding_length = struct.unpack_from(">iiii", chunk, 2)
    position = 18 + encoding_length
    flags, count = struct.unpack_from(">ii", chunk, position)
    if version != 3 or flags & 0xFF != STRING_VECTOR:
        raise ValueError(f"expected a character vector, version 3; found {version}, {flags:#x}")
    position += 8
    strings = []
    for _ in range(count):
        _, length = struct.unpack_from(">ii", chunk, position)
        position += 8
        if length != NOT_AVAILABLE:
            strings.append(chunk[position : position + length].decode("utf-8", "replace"))
            position += length
    return strings


def _chapters(lines: list[str]) -> list[tuple[str, ...]]:
    """Paragraphs per chapter, without headings and emphasis, one space between words."""
    text = "\n".join(lines).replace("\r", "").replace("_", "")
    parts = re.split(r"(?mi)^\s*chapter\s+[ivxlc\d]+\.?\s*$", text)[1:]
    chapters = []
    for part in parts:
        part = re.sub(r"(?mi)^\s*(volume\s+[ivx]+|the end|finis)\.?\s*$", "", part)
        paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", part))
        kept = tuple(p for p in paragraphs if len(p) > 1)
        if kept:
            chapters.append(kept)
    return chapters
