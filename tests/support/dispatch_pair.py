"""Two ranks of one process: engines, dispatchers, and calls that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from configs.schema import DispatchConfig, TransferConfig
from dispatch import DispatchLayout, ExpertMap, TransferDispatcher
from transfer import TransferEngine

LAYOUT = DispatchLayout(
    hidden=24, topk=2, num_logical=5, num_layers=2, dtype=torch.bfloat16, max_tokens=6
)
NAMES = {rank: f"{rank + 1:016x}" for rank in range(2)}
EVEN = ExpertMap.even(num_layers=2, num_logical=5, ranks=[0, 1])


@contextmanager
def pair(
    *,
    timeout_s: float = 60.0,
    layouts: Sequence[DispatchLayout] = (LAYOUT, LAYOUT),
    **config: object,
) -> Iterator[list[TransferDispatcher]]:
    engines = [TransferEngine(TransferConfig(), name=NAMES[r], secret=b"test") for r in range(2)]
    dispatchers = [
        TransferDispatcher(
            engine, DispatchConfig(pass_timeout_s=timeout_s, **config), layout=layout
        )
        for engine, layout in zip(engines, layouts, strict=True)
    ]
    with engines[0], engines[1]:
        engines[0].connect(engines[1].address, timeout_s=60)
        yield dispatchers
        for dispatcher in dispatchers:
            dispatcher.close()
            dispatcher.close()


def prepared(dispatchers, epoch: int, **options) -> list[dict[int, bytes]]:
    return [
        dispatcher.prepare(epoch=epoch, rank=rank, members=NAMES, expert_map=EVEN, **options)
        for rank, dispatcher in enumerate(dispatchers)
    ]


def install(dispatchers, epoch: int, **options) -> None:
    offers = prepared(dispatchers, epoch, **options)
    for rank, dispatcher in enumerate(dispatchers):
        dispatcher.install({1 - rank: offers[1 - rank][rank]})


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run two ranks at once; return what each returned or raised."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the outcome of a rank, looked at by the test
            return error

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(outcome, call) for call in (first, second)]
        return futures[0].result(60), futures[1].result(60)
