"""Whom this process suspects, on which evidence, and who has still to answer a probe. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.evidence import Evidence, EvidenceKind
from elastic.view import View


class Suspicions:
    """Suspicions about members of the current view.

    Attributes:
        own: Suspects by own evidence; a proposal removes these and nobody else.
        accused: Named by other members, and not looked into yet.
        probes: Who was asked whether it runs, and when the answer is due.
    """

    __slots__ = ("accused", "own", "probes")

    def __init__(self) -> None:
        self.own: dict[str, Evidence] = {}
        self.accused: set[str] = set()
        self.probes: dict[str, float] = {}

    def add(self, names: Iterable[str], evidence: Evidence) -> tuple[str, ...]:
        """Suspect `names`; the strongest evidence stays. Return those not suspected before."""
        news = []
        for name in names:
            known = self.own.get(name)
            if known is None:
                news.append(name)
            if known is None or evidence.kind.strength > known.kind.strength:
                self.own[name] = evidence
            self.probes.pop(name, None)
        return tuple(news)

    def probe(self, names: Iterable[str], due: float) -> tuple[str, ...]:
        """Note that `names` are asked; return those that have to be, being neither yet."""
        asked = tuple(name for name in names if name not in self.own.keys() | self.probes.keys())
        self.probes.update(dict.fromkeys(asked, due))
        return asked

    def overdue(self, now: float) -> tuple[str, ...]:
        """Return who should have answered by now."""
        return tuple(name for name, due in self.probes.items() if due <= now)

    def unproven(self) -> tuple[str, ...]:
        """Return those that only others accuse."""
        return tuple(sorted(self.accused - self.own.keys()))

    def forget_deadlines(self) -> None:
        """Drop whatever rests on somebody's silence alone."""
        self.probes.clear()
        self.own = {n: e for n, e in self.own.items() if e.kind is not EvidenceKind.DEADLINE}

    def keep_members(self, members: Iterable[str]) -> None:
        """Begin a new view: own suspicions of its members stay, everything else goes."""
        self.own = {n: self.own[n] for n in self.own.keys() & set(members)}
        self.accused.clear()
        self.probes.clear()

    def unreachable(self) -> frozenset[str]:
        """Return the suspects that no message can reach."""
        return frozenset(n for n, e in self.own.items() if e.kind is not EvidenceKind.DEADLINE)

    def leave_weak_minority(self, view: View) -> bool:
        """Whether the suspects could as well be the group, and we the ones that were cut off.

        Members whose process ended for certain don't count. Of two halves, the one with the
        lowest rank goes first.
        """
        ended = {n for n, e in self.own.items() if e.kind is EvidenceKind.PROCESS_EXIT}
        possible = [m for m in view.members if m.incarnation not in ended]
        left = [m for m in possible if m.incarnation not in self.own]
        if len(left) * 2 == len(possible):
            return left[0].rank != possible[0].rank
        return len(left) * 2 < len(possible)
