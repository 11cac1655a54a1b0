"""A rank with a transfer engine and a dispatcher, connected to the others through a board."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from configs.schema import DispatchConfig, TransferBackend, TransferConfig
from dispatch import DispatchLayout, ExpertMap, TransferDispatcher
from tests.support.moe_reference import draw_tokens, reference, run_layer
from tests.support.ranks import Board
from transfer import TransferEngine

SECRET = b"a secret of this test"
LAYOUT = DispatchLayout(
    hidden=40, topk=4, num_logical=9, num_layers=2, dtype=torch.bfloat16, max_tokens=12
)


class DispatchRank:
    def __init__(
        self,
        board: Board,
        *,
        layout: DispatchLayout = LAYOUT,
        backend: TransferBackend = TransferBackend.AUTO,
        pass_timeout_s: float = 60.0,
        **config: object,
    ) -> None:
        self.board, self.layout = board, layout
        self.engine = TransferEngine(
            TransferConfig(backend=backend), name=self.name_of(board.rank), secret=SECRET
        )
        self.dispatcher = TransferDispatcher(
            self.engine,
            DispatchConfig(pass_timeout_s=pass_timeout_s, **config),
            layout=layout,
        )
        self.generator = torch.Generator()
        self._changing = threading.Lock()
        self.engine.on_notify(self._take_abort)

    @staticmethod
    def name_of(rank: int) -> str:
        return f"{rank + 1:016x}"

    def __enter__(self) -> DispatchRank:
        self.engine.open()
        addresses = self.board.exchange("address", self.engine.address)
        for rank, address in addresses.items():
            if rank != self.board.rank:
                self.engine.connect(address, timeout_s=60)
        return self

    def __exit__(self, *exception: object) -> None:
        self.dispatcher.close()
        self.engine.close()

    def install(self, epoch: int, ranks: Sequence[int], expert_map: ExpertMap) -> None:
        me = self.board.rank
        with self._changing:
            offers = self.dispatcher.prepare(
                epoch=epoch,
                rank=me,
                members={rank: self.name_of(rank) for rank in ranks},
                expert_map=expert_map,
            )
            self.engine.resume()
        everybodys = self.board.exchange(f"offers-{epoch}", offers, list(ranks))
        self.dispatcher.install({rank: everybodys[rank][me] for rank in ranks if rank != me})

    def abort(self, ranks: Sequence[int]) -> None:
        """Tell others that this epoch is lost, so that nobody waits for who has left it."""
        epoch = self.dispatcher.epoch.to_bytes(8, "little")
        for rank in ranks:
            if rank != self.board.rank:
                self.engine.notify(self.name_of(rank), epoch)

    def _take_abort(self, peer: str, payload: bytes) -> None:
        with self._changing:
            if int.from_bytes(payload, "little") == self.dispatcher.epoch:
                self.engine.interrupt(f"{peer} has given up the pass")

    def check_pass(
        self,
        num_tokens: int,
        *,
        hot: int | None = None,
        masked: float = 0.1,
        combine_dtype: torch.dtype | None = None,
    ) -> None:
        """Run a pass on random tokens and compare the bits."""
        self.dispatcher.begin_pass()
        for layer in range(self.layout.num_layers):
            x, ids, weights = draw_tokens(
                self.layout, num_tokens, self.generator, hot=hot, masked=masked
            )
            out = run_layer(self.dispatcher, x, ids, weights, layer, combine_dtype=combine_dtype)
            want = reference(x, ids, weights, layer, combine_dtype=combine_dtype)
            assert torch.equal(out, want), (layer, num_tokens)
        self.dispatcher.end_pass()
