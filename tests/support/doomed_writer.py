"""A client process that puts values the short way and is killed while it holds more places."""

from __future__ import annotations

import os
import secrets
import signal
from multiprocessing.connection import Connection

from configs.schema import KVStoreConfig
from kvstore import PutOutcome, Store
from kvstore.client import reserved_places


def put_and_die(
    pipe: Connection, address: str, secret: bytes, config: KVStoreConfig, number: int, nbytes: int
) -> None:
    """Send (incarnation, values by key, whether the last was short, places held); then SIGKILL."""
    reserved_places.IDLE_S = 60.0
    store = Store.connect(address, secret=secret, config=config)
    values = {secrets.token_bytes(16): secrets.token_bytes(nbytes) for _ in range(number)}
    requests = []
    ask = store.client._link.ask

    def listen(request, expected, **options):
        requests.append(type(request).__name__)
        return ask(request, expected, **options)

    store.client._link.ask = listen
    for key, data in values.items():
        assert store.put(key, data) is PutOutcome.STORED
    held = sum(len(places) for places in store.client.places._places.values())
    pipe.send((store.client.core.record.name, values, requests[-1] == "Store", held))
    assert pipe.recv() == "die"
    key, data = secrets.token_bytes(16), secrets.token_bytes(nbytes)
    pipe.send((key, data))
    assert store.put(key, data) is PutOutcome.STORED
    os.kill(os.getpid(), signal.SIGKILL)  # nothing was sent to the node of this one
