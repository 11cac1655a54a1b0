"""Puts of one value in one request, for tests: what is asked for them, and that nothing is left."""

from __future__ import annotations

import secrets

from kvstore import PutOutcome
from kvstore.wire import messages as m
from tests.support.waits import eventually

STORED = PutOutcome.STORED
SIZE = 4096


class Requests:
    """What a store asks its masters, by the types' names."""

    def __init__(self, store, monkeypatch):
        link = store.client._link
        self.names, self._ask = [], link.ask
        self.before = self.after = None  # called with the request
        # An event loop's own requests are heard where a thread makes them.
        heard = {"ask": self._listen, "ask_encoded": self._listen_to_bytes,
                 "near_question": lambda _: None}  # fmt: skip
        for name, listen in heard.items():
            monkeypatch.setattr(link, name, listen)

    def _listen_to_bytes(self, payload, **options):
        return self._listen(m.decode_request(payload), m.Stored, **options)

    def _listen(self, request, expected, **options):
        self.names.append(type(request).__name__)
        if self.before is not None:
            self.before(request)
        reply = self._ask(request, expected, **options)
        if self.after is not None:
            self.after(request)
        return reply

    def take(self):
        names, self.names = self.names, []
        return names


def value(nbytes=SIZE):
    return secrets.token_bytes(nbytes)


def warm(store, nbytes=SIZE):
    """Put values until the store holds a place for the next; return their keys."""
    keys = [secrets.token_bytes(16) for _ in range(3)]
    for key in keys:
        assert store.put(key, value(nbytes)) is STORED
    return keys


def check_empty(pool):
    """Every byte of the pool is free once its blocks are removed and its clients closed."""

    def all_free():
        for master in pool.masters:
            master.check_invariants()
        figures = [master.statistics() for master in pool.masters]
        return all(f.free_bytes == f.capacity_bytes for f in figures)

    eventually(all_free, "every byte is free again")
