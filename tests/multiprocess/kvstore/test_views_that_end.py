"""Values read in place by processes that stand still or are killed, and of nodes that are."""

from __future__ import annotations

import secrets
import signal

from kvstore import LeaseLost, PutOutcome, Store
from tests.support.store_pool import Pool
from tests.support.store_worker import StorePool, content
from tests.support.viewing_process import Viewer
from tests.support.waits import eventually

SIZE = 20_000
LEASE_S = 1.5


def overwritten(pool, value):
    """Put other values until those bytes are nowhere in the pool."""
    segment = pool.nodes[0].segments[0].region.array
    for _ in range(200):
        pool.store.put(secrets.token_hex(8), secrets.token_bytes(SIZE))
        if value not in segment.tobytes():
            return True
    return False


def viewed(pool):
    value = secrets.token_bytes(SIZE)
    assert pool.store.put("viewed", value) is PutOutcome.STORED
    return value


def test_a_client_that_stood_still_for_longer_than_its_lease_says_so(stack):
    pool = Pool(stack, segment_bytes=1 << 17, lease_s=LEASE_S)
    value = viewed(pool)
    with Viewer(pool, "viewed") as viewer:
        assert viewer.in_place
        assert viewer.value == value
        viewer.signal(signal.SIGSTOP)
        eventually(lambda: pool.master.statistics().leases == 0, "nobody renews it")
        assert overwritten(pool, value)
        viewer.signal(signal.SIGCONT)
        assert viewer.ask("bytes") != value, "they are others now"
        assert viewer.ask("end") == "lost"


def test_a_client_that_stood_still_for_less_than_that_goes_on(stack):
    pool = Pool(stack, segment_bytes=1 << 17, lease_s=20.0)
    value = viewed(pool)
    with Viewer(pool, "viewed") as viewer:
        viewer.signal(signal.SIGSTOP)
        assert not overwritten(pool, value)
        viewer.signal(signal.SIGCONT)
        assert viewer.ask("bytes") == value
        assert viewer.ask("end") == "held"
    eventually(lambda: pool.master.statistics().leases == 0, "it is given back")


def test_a_client_that_is_killed_pins_nothing_for_longer_than_a_lease(stack):
    pool = Pool(stack, segment_bytes=1 << 17, lease_s=LEASE_S)
    value = viewed(pool)
    with Viewer(pool, "viewed") as viewer:
        assert viewer.in_place
        viewer.kill()
    eventually(lambda: pool.master.statistics().leases == 0, "its lease runs out")
    assert overwritten(pool, value)
    pool.master.check_invariants()


def view_in_worker(commands, key):
    commands.store = Store(commands.client)
    commands.viewing = commands.store.view(key)
    commands.view = commands.viewing.__enter__()
    return commands.view.in_place, bytes(commands.view.memory)


def renewed_in_worker(commands):
    """Wait until the lease was renewed by a request that began after this."""
    lease = commands.view._lease
    for _ in range(2):
        first_s = lease.deadline_s
        eventually(lambda first_s=first_s: lease.deadline_s > first_s, "it is renewed")


def end_in_worker(commands):
    memory = bytes(commands.view.memory)
    held = commands.view.held()
    try:
        commands.viewing.__exit__(None, None, None)
    except LeaseLost:
        return memory, held, "lost"
    return memory, held, "held"


def test_a_node_that_is_killed_leaves_what_is_viewed_as_it_was():
    key = secrets.token_bytes(16)
    with StorePool(2, lease_s=2.0) as pool:
        reader, node = pool.workers
        assert reader.ask("put", [key]) == ["stored"], "on the other's memory"
        expected = content(key, 4096).tobytes()
        assert reader.ask("run", view_in_worker, key) == (True, expected)
        node.kill()
        reader.ask("run", renewed_in_worker)
        assert reader.ask("run", end_in_worker) == (expected, True, "held")
        eventually(lambda: pool.statistics().leases == 0, "it is given back")
