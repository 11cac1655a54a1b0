"""Reading /sys without ever failing: what is missing is None, what is odd is None with a note.

Containers hide parts of it, drivers refuse single files with EINVAL, virtual machines give -1 for
what they do not know. So no reader here raises for what it finds.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

# Attributes of sysfs are at most a page; a recorded tree may hold anything.
TEXT_BYTES_MAX: Final = 1 << 16
# How a driver says that it has no value now.
_NO_VALUE: Final = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.EIO, errno.ENXIO}
_DIGITS: Final = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key by which mlx5_2 comes before mlx5_10."""
    parts = _DIGITS.split(name)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts if part)


class Sysfs:
    """A file tree with `sys/` and perhaps `proc/` in it; paths are relative to its root.

    Symbolic links are followed, but never out of the root. Not thread-safe: it collects `notes`.

    Args:
        root: "/" for this machine, else where a recorded tree lies.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.path.realpath(root)
        self.notes: list[str] = []

    def text(self, path: str) -> str | None:
        """Return a file's text without surrounding blanks; None if it has none to give."""
        place = self.resolve(path)
        if place is None:
            return None
        try:
            with open(os.path.join(self.root, place), "rb") as file:
                content = file.read(TEXT_BYTES_MAX)
        except OSError as error:
            if error.errno not in _NO_VALUE:
                self.note(path, f"not readable: {error.strerror}")
            return None
        return content.decode("utf-8", errors="replace").strip()

    def number(self, path: str) -> int | None:
        """Return a file's integer, decimal or 0x; None if there is no file or no integer in it."""
        text = self.text(path)
        if text is None:
            return None
        try:
            return int(text, 16 if text.startswith("0x") else 10)
        except ValueError:
            self.note(path, f"no number: {text[:40]!r}")
            return None

    def lines(self, path: str, *, keep: str) -> tuple[str, ...]:
        """Return the lines of a file that begin with a word; () if there are none."""
        text = self.text(path) or ""
        return tuple(line for line in text.splitlines() if line.startswith(keep))

    def names(self, path: str) -> tuple[str, ...]:
        """Return what a folder holds, in natural order; () if there is no such folder."""
        place = self.resolve(path)
        if place is None:
            return ()
        try:
            return tuple(sorted(os.listdir(os.path.join(self.root, place)), key=natural))
        except OSError as error:
            self.note(path, f"not listed: {error.strerror}")
            return ()

    def resolve(self, path: str) -> str | None:
        """Return where a path really lies, relative to the root; None if nothing is there."""
        place = os.path.realpath(os.path.join(self.root, path))
        if not os.path.lexists(place) or os.path.islink(place):
            return None
        relative = os.path.relpath(place, self.root)
        if relative.startswith(".."):
            self.note(path, "leads out of the tree")
            return None
        return relative

    def note(self, path: str, what: str) -> None:
        """Remember something odd, once."""
        line = f"{path}: {what}"
        if line not in self.notes:
            self.notes.append(line)


class RecordingSysfs(Sysfs):
    """A tree that remembers whatever was read from it: the least that gives the same reading."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        super().__init__(root)
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.folders: set[str] = set()

    def text(self, path: str) -> str | None:
        """Return a file's text, and keep it."""
        found = super().text(path)
        if found is not None and (place := super().resolve(path)) is not None:
            self.files[place] = found
        return found

    def lines(self, path: str, *, keep: str) -> tuple[str, ...]:
        """Return some lines of a file, and keep only these: the others may name serials."""
        found = super().lines(path, keep=keep)
        place = super().resolve(path)
        if place is not None:
            self.files[place] = "\n".join(found)
        return found

    def names(self, path: str) -> tuple[str, ...]:
        """Return what a folder holds. Members are kept only once they are looked at."""
        found = super().names(path)
        if found and (place := super().resolve(path)) is not None:
            self.folders.add(place)
        return found

    def resolve(self, path: str) -> str | None:
        """Return where a path really lies, and keep every link on the way."""
        found = super().resolve(path)
        if found is None:
            return None
        at = ""
        for part in Path(path).parts:
            here = os.path.join(at, part)
            there = super().resolve(here)
            if there is None:
                return found
            if there != os.path.normpath(here):
                self.links[here] = there
            at = there
        if os.path.isdir(os.path.join(self.root, found)):
            self.folders.add(found)
        return found
