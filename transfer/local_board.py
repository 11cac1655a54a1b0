"""The memory that a caller of the local control channel shares with its server: see
`transfer/compiled/board.c`, which alone reads and writes it.

The caller makes it and passes it on with its proof. The server maps it once the proof was right,
and says so there; before, and where either end has no compiled part, all goes by the socket.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Final

BOARD_BYTES: Final = 8192
WAKE: Final = 0xFFFFFFFF  # as the length of a frame: look at the board
LOAN: Final = 0xFFFFFFFE  # as that: what does the server lend? Back with the descriptors
LENT_MAX: Final = 8  # descriptors at once
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def new_board() -> int:
    """Return a descriptor of fresh memory, zero; -1 if there is none to be had."""
    board = -1
    try:
        board = os.memfd_create("moe-runtime-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(board, BOARD_BYTES)
        fcntl.fcntl(board, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:  # all goes by the socket, then
        if board >= 0:
            os.close(board)
        return -1
    return board


def is_board(descriptor: int) -> bool:
    """Tell whether this is memory that nobody can take away from under us."""
    try:
        found = os.fstat(descriptor)
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == BOARD_BYTES and seals == _SEALS
