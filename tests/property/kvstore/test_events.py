"""All events folded in order are the master's index, whatever was asked of it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule

from kvstore.events.event_log import Cleared, EventLog, Stored
from kvstore.master.store_master import StoreMaster
from tests.property.kvstore.test_master import TIMING, MasterMachine

FIRST = 1_000


class EventMachine(MasterMachine):
    """The operations of the master's own property test, with a subscriber that never sleeps."""

    def __init__(self):
        super().__init__()
        self.master = StoreMaster(TIMING, events=EventLog(first_sequence=FIRST))
        self.told: set[bytes] = {b"from an earlier master"}
        self.sequence = FIRST - 1

    @rule()
    def told_anew(self):
        self.master.restate_events()

    @precondition(lambda self: self.told)
    @rule()
    def subscriber_forgets(self):
        """What a restatement says is enough by itself."""
        self.told = {b"anything"}
        self.master.restate_events()

    @invariant()
    def folded_events_are_the_index(self):
        for batch in self.master.take_events():
            assert batch.sequence == self.sequence + 1
            assert batch.changes
            self.sequence = batch.sequence
            for change in batch.changes:
                if isinstance(change, Cleared):
                    self.told = set()
                elif isinstance(change, Stored):
                    assert not self.told & set(change.keys), "stored twice"
                    self.told |= set(change.keys)
                else:
                    assert self.told >= set(change.keys), "removed what was not there"
                    self.told -= set(change.keys)
        index = set(self.master._catalog.index.keys())
        assert self.told == index


TestEvents = EventMachine.TestCase
TestEvents.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
