"""A worker without a model: it joins, and exchanges one message with everybody per round.

Run as `python -m tests.support.round_worker`; everything comes from the environment (`Setup`).
What happens is written as JSON lines to FOLDER/<incarnation>.jsonl, with CLOCK_MONOTONIC times,
which are comparable between the processes of a host.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from configs.schema import ElasticConfig, TransferConfig
from elastic.agent import incarnation_of_this_process
from elastic.coordinator import Coordinator
from elastic.errors import Evicted
from elastic.expert_server import ExpertServer, Slabs
from elastic.expert_source import EachExpert, ExpertLoader, place_of
from elastic.peer_experts import PeerExpertSource
from elastic.store import TCPStoreMembership
from elastic.view import Member, Role, View
from tests.support.small_bank import SmallBank, bytes_of
from transfer import (
    Access,
    ImmediateTimeout,
    Interrupted,
    PeerLost,
    RegionKey,
    TransferEngine,
    TransferError,
    allocate,
)

LAYERS, EXPERTS, EXPERT_BYTES = 2, 8, 4096
CELL_BYTES = 32
SECRET = b"the secret of this test"


class RoundWorker:
    """One life: an engine, a coordinator, and the rounds."""

    def __init__(self, rank: int, incarnation: str) -> None:
        setting = os.environ
        self.rank, self.incarnation = rank, incarnation
        self.log = (Path(setting["FOLDER"]) / f"{incarnation}.jsonl").open("a", buffering=1)
        self.round_timeout_s = float(setting.get("ROUND_TIMEOUT_S", "2.0"))
        self.stop = False
        self.round = 0
        self.view: View | None = None
        self.engine = TransferEngine(TransferConfig(), name=incarnation, secret=SECRET)
        self.store = TCPStoreMembership("127.0.0.1", int(setting["STORE_PORT"]))
        self.bank = SmallBank(EXPERT_BYTES, allocate)
        slabs = Slabs(self.engine, self.bank)
        self.server = ExpertServer(self.engine, self.bank, slabs)
        peers = PeerExpertSource(
            self.engine,
            self.bank,
            slabs,
            peers=lambda: [peer.name for peer in self.engine.peers() if peer.alive],
        )
        disk = EachExpert("disk", self.bank, self.read_disk)
        self.loader = ExpertLoader(self.bank, [peers, disk])
        self.coordinator = Coordinator(
            ElasticConfig.model_validate_json(setting["ELASTIC"]),
            store=self.store,
            engine=self.engine,
            member=self,
            identity=Member(
                rank=rank,
                incarnation=incarnation,
                role=Role.BOTH,
                node="here",
                address="",
                pid=os.getpid(),
            ),
            num_layers=LAYERS,
            num_logical=EXPERTS,
            expected_workers=int(setting["WORLD_SIZE"]),
        )
        self.windows: dict[int, Any] = {}
        self.keys: dict[int, RegionKey] = {}

    def say(self, event: str, **facts: object) -> None:
        line = {"event": event, "t": time.monotonic(), "rank": self.rank, **facts}
        self.log.write(json.dumps(line) + "\n")

    # --- GroupMember ----------------------------------------------------------------------------

    def committed(self, view: View) -> None:
        self.say("committed", epoch=view.epoch)

    def prepare(self, view: View) -> dict[int, bytes]:
        for region in self.windows.values():
            self.engine.release(region)
        self.windows, offers = {}, {}
        for member in view.others(self.incarnation):
            region = self.engine.register(allocate(2 * CELL_BYTES))
            key = self.engine.offer(region, to=member.incarnation, access=Access.WRITE)
            self.windows[member.rank] = region
            offers[member.rank] = key.encode()
        return offers

    def load(self, view: View) -> None:
        experts = view.expert_map
        wanted = [(i, e) for i in range(LAYERS) for e in experts.experts_of(self.rank, i)]
        served = self.loader.load(wanted)
        for expert in wanted:
            assert place_of(self.bank, expert).equal(bytes_of(expert, EXPERT_BYTES)), expert
        counts = {name: len(found) for name, found in served.by_source.items()}
        self.say("loaded", epoch=view.epoch, served=counts, failures=served.failures)

    def install(self, view: View, offers: Mapping[int, bytes]) -> None:
        self.keys = {rank: RegionKey.decode(offer) for rank, offer in offers.items()}
        self.round, self.view = 0, view
        self.say("installed", epoch=view.epoch, ranks=view.ranks)

    def read_disk(self, layer: int, logical: int, blob: Any) -> bool:
        blob.copy_(bytes_of((layer, logical), EXPERT_BYTES))
        return True

    # --- rounds ---------------------------------------------------------------------------------

    def run(self) -> None:
        with self.engine:
            self.server.open()
            try:
                self.say("started", address=self.engine.address, pid=os.getpid())
                self.coordinator.join()
                while not self.stop:
                    self.one_round()
                    time.sleep(0.002)
                self.say("leaving")
                self.coordinator.leave()
                self.say("left")
            except Evicted as error:
                self.say("evicted", epoch=error.epoch)
                raise
            finally:
                self.coordinator.close()
                self.server.close()
                self.store.close()

    def one_round(self) -> None:
        if self.coordinator.poll() is not None:
            return
        view = self.view
        assert view is not None
        try:
            self.exchange(view)
        except PeerLost as error:
            lost = view.named(error.peer)
            self.say("lost", peer=error.peer, evidence=error.evidence)
            self.coordinator.report([lost.rank] if lost else [], error.evidence)
        except ImmediateTimeout as error:
            late = {m.rank for peer, _ in error.missing if (m := view.named(peer)) is not None}
            self.say("late", ranks=sorted(late))
            self.coordinator.report(late, "no message")
        except Interrupted:
            assert self.coordinator.poll() is not None, "interrupted for nothing"
        except TransferError as error:
            self.say("failed", error=repr(error))
            self.coordinator.report([], repr(error))

    def exchange(self, view: View) -> None:
        parity = self.round % 2
        immediate = (view.epoch & 0xFFFFFF) << 1 | parity
        cell = np.array([view.epoch, self.round, self.rank, 7], dtype=np.int64)
        others = view.others(self.incarnation)
        for member in others:
            source = self.source_region()
            source.tensor[:CELL_BYTES].numpy().view(np.int64)[:] = cell
            self.engine.write(
                self.engine.peer(member.incarnation),
                source,
                self.keys[member.rank],
                0,
                parity * CELL_BYTES,
                CELL_BYTES,
                immediate=immediate,
            ).wait(self.round_timeout_s)
        counts = {(member.incarnation, immediate): 1 for member in others}
        self.engine.expect(counts, timeout_s=self.round_timeout_s)
        for member in others:
            window = self.windows[member.rank].tensor.numpy().view(np.int64)
            found = window[4 * parity : 4 * parity + 4].tolist()
            assert found == [view.epoch, self.round, member.rank, 7], (found, view.epoch)
        self.round += 1
        if self.round % 50 == 1:
            self.say("round", epoch=view.epoch, round=self.round)

    def source_region(self) -> Any:
        if not hasattr(self, "_source"):
            self._source = self.engine.register(allocate(4096))
        return self._source


def main() -> None:
    store = TCPStoreMembership("127.0.0.1", int(os.environ["STORE_PORT"]))
    rank = store.claim_slot("here", int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]))
    store.close()
    worker = RoundWorker(rank, incarnation_of_this_process())

    def stop(number: int, frame: FrameType | None) -> None:
        worker.stop = True

    signal.signal(signal.SIGTERM, stop)
    try:
        worker.run()
    except Evicted:
        sys.exit(75)  # the agent starts this slot again, as a new incarnation


if __name__ == "__main__":
    main()
