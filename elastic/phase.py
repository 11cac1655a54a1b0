"""Where a process stands between a view and the next. Pure.

Committed / RecordRead / ProposalAnswered (newer epoch, we are in it)
┌─────────────────────────────────────────────────────────┐
│                                                         ▼
OUTSIDE ─────┼──────────────────────────────────────────────────▶ INSTALLING ──┐
│      loss, ABORT, dropped pass, late member             │       │ all offers and
AGREEING ◀────────────────────────────────────────────────────┤       │ readies in hand
▲                                                         │       ▼
└──────────────── loss, ABORT, dropped pass ──────────── SERVING ◀┘
any of them ── newer view without us ──▶ EVICTED (or LEFT, if we asked for it)
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where a process stands."""

    OUTSIDE = "outside"
    INSTALLING = "installing"
    SERVING = "serving"
    AGREEING = "agreeing"
    EVICTED = "evicted"
    LEFT = "left"


INSIDE = (Phase.INSTALLING, Phase.SERVING, Phase.AGREEING)
