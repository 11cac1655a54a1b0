"""The eviction policies again, written to be read: plain lists, searched and sorted."""

from __future__ import annotations

from configs.schema import Eviction
from kvstore.eviction.hit_rate import USE_CLASSES, HitRates
from kvstore.eviction.prefix_aware import GONE_MIN, GONE_PER_BLOCK


class RecencyModel:
    def __init__(self):
        self.known = {}  # name -> stamp of the last use
        self.held = set()
        self.now = 0

    def admit(self, name, parent):
        self.now += 1
        self.known[name] = self.now

    def touch(self, name):
        self.now += 1
        if name not in self.held:
            self.known[name] = self.now

    def hold(self, name):
        self.held.add(name)

    def unhold(self, name):
        if name in self.held:
            self.held.remove(name)
            self.touch(name)

    def remove(self, name, *, evicted):
        self.known.pop(name, None)
        self.held.discard(name)

    def victim(self):
        return min(set(self.known) - self.held, key=self.known.get, default=None)


class FifoModel:
    """All blocks in one list of [name, queue, uses], oldest first."""

    def __init__(self):
        self.entries, self.gone, self.held = [], [], []

    @property
    def known(self):
        return [entry[0] for entry in self.entries + self.held]

    def entry(self, name):
        return next((entry for entry in self.entries + self.held if entry[0] == name), None)

    def admit(self, name, parent):
        self.entries.append([name, "main" if name in self.gone else "probation", 0])
        self.gone = [other for other in self.gone if other != name]

    def touch(self, name):
        entry = self.entry(name)
        entry[2] = min(3, entry[2] + 1)

    def hold(self, name):
        entry = self.entry(name)
        if entry in self.entries:
            self.entries.remove(entry)
            self.held.append(entry)

    def unhold(self, name):
        entry = self.entry(name)
        if entry in self.held:
            self.held.remove(entry)
            self.entries.append(entry)

    def remove(self, name, *, evicted):
        entry = self.entry(name)
        if entry is None:
            return
        (self.held if entry in self.held else self.entries).remove(entry)
        if evicted and entry[1] == "probation":
            self.gone = [*self.gone, name][-max(1, len(self.known)) :]

    def victim(self):
        while self.entries:
            probation = [entry for entry in self.entries if entry[1] == "probation"]
            main = [entry for entry in self.entries if entry[1] == "main"]
            crowded = 10 * len(probation) >= len(self.entries)
            oldest = probation[0] if probation and (crowded or not main) else main[0]
            if oldest[2] == 0 or (oldest[1] == "probation" and oldest[2] == 1):
                return oldest[0]
            self.entries.remove(oldest)
            uses = 0 if oldest[1] == "probation" else oldest[2] - 1
            self.entries.append([oldest[0], "main", uses])
        return None


class PrefixModel:
    """Blocks as rows of a table; queues are found by sorting it."""

    def __init__(self):
        self.known = {}  # name -> {parent, uses, used_at, place, aside}
        self.gone = []  # (name, uses, used_at), oldest first
        self.held, self.rates, self.tick, self.steps = set(), HitRates(), 0, 0

    def row(self, parent, uses):
        self.steps += 1
        return {
            "parent": parent,
            "uses": uses,
            "used_at": self.tick,
            "place": self.steps,
            "aside": 0,
        }

    def admit(self, name, parent):
        self.tick += 1
        uses = 0
        for gone in [gone for gone in self.gone if gone[0] == name]:
            self.gone.remove(gone)
            self.rates.hit(min(gone[1], USE_CLASSES - 1), gone[2], self.tick)
            uses = gone[1] + 1
        self.rates.wait(min(uses, USE_CLASSES - 1), self.tick)
        self.known[name] = self.row(parent, uses)

    def touch(self, name):
        self.tick += 1
        row = self.known[name]
        self.rates.hit(min(row["uses"], USE_CLASSES - 1), row["used_at"], self.tick)
        self.rates.wait(min(row["uses"] + 1, USE_CLASSES - 1), self.tick)
        self.known[name] = self.row(row["parent"], row["uses"] + 1)

    def hold(self, name):
        self.held.add(name)
        self.known[name]["aside"] = 0

    def unhold(self, name):
        if name in self.held:
            self.held.remove(name)
            self.steps += 1
            self.known[name]["place"] = self.steps

    def has_child(self, name):
        return any(row["parent"] == name for row in self.known.values())

    def remove(self, name, *, evicted):
        row = self.known.pop(name, None)
        if row is None:
            return
        self.held.discard(name)
        parent = self.known.get(row["parent"])
        if parent is not None and parent["aside"] and not self.has_child(row["parent"]):
            parent["aside"] = 0
            parent["place"] = min(other["place"] for other in self.known.values()) - 1
        if evicted:
            self.gone.append((name, row["uses"], row["used_at"]))
            assert len(self.gone) <= max(GONE_MIN, GONE_PER_BLOCK * len(self.known))
        else:
            self.rates.leave(min(row["uses"], USE_CLASSES - 1), row["used_at"])

    def victim(self):
        heads = []
        for use_class in range(USE_CLASSES):
            queue = [
                name
                for name, row in self.known.items()
                if min(row["uses"], USE_CLASSES - 1) == use_class
                and not row["aside"]
                and name not in self.held
            ]
            for name in sorted(queue, key=lambda name: self.known[name]["place"]):
                if not self.has_child(name):
                    age = self.tick - self.known[name]["used_at"]
                    heads.append((self.rates.rate(use_class, age), -age, name))
                    break
                self.steps += 1
                self.known[name]["aside"] = self.steps
        if heads:
            return min(heads)[2]
        aside = [name for name, row in self.known.items() if row["aside"]]
        return max(aside, key=lambda name: self.known[name]["aside"], default=None)


MODELS = {
    Eviction.LRU: RecencyModel,
    Eviction.S3_FIFO: FifoModel,
    Eviction.PREFIX_AWARE: PrefixModel,
}
