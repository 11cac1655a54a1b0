"""What a worker says of its dispatch, and what the front shows of it: one series for each rank."""

from __future__ import annotations

import torch

from dispatch import DispatchLayout, LocalDispatcher
from moe_runtime.dispatch_load import DispatchLoad
from moe_runtime.front.journal import Journal
from moe_runtime.front.metrics import Metrics
from moe_runtime.front.router import Router
from moe_runtime.messages import Hello, Load, ViewCommitted, decode_worker_message, encode

LAYOUT = DispatchLayout(
    hidden=8, topk=2, num_logical=4, num_layers=3, dtype=torch.bfloat16, max_tokens=8
)


def exchange(dispatcher: LocalDispatcher, experts: list[int]) -> None:
    ids = torch.tensor([[expert, -1] for expert in experts])
    x, weights = torch.zeros(len(ids), 8).bfloat16(), torch.ones(len(ids), 2)
    dispatcher.begin_pass()
    rows, handle = dispatcher.dispatch(x, ids, weights, layer=2)
    dispatcher.combine(rows.rows, handle)
    dispatcher.end_pass()


def test_totals_and_what_is_true_now():
    dispatcher = LocalDispatcher(layout=LAYOUT)
    told = DispatchLoad(dispatcher, rank=6)
    assert told.counters() == {}, "before the first look"
    exchange(dispatcher, [0, 1, 1, 1])
    load = told.update(10.0)
    assert load.rank == 6
    counters = told.counters()
    assert counters["dispatch_choices"] == counters["dispatch_rows_received"] == 4.0
    assert counters["dispatch_bytes_sent"] == 0.0, "there is nobody else"
    gauges = told.gauges(load)
    assert gauges["expert_load_ratio"] == 1.5
    assert told.gauges(told.update(70.0))["dispatch_rows_per_s"] == (
        gauges["dispatch_rows_per_s"] / 2
    )


def load_message(name: str, **gauges: float) -> Load:
    fields = {"running": 0, "waiting": 0, "free_pages": 1, "num_pages": 1, "epoch": 1}
    return Load(incarnation=name, counters={}, gauges=gauges, **fields)


def test_gauges_travel_and_older_workers_send_none():
    message = load_message("a", dispatch_rows_per_s=3.0)
    assert decode_worker_message(encode(message)) == message
    fields = {"running": 0, "waiting": 0, "free_pages": 1, "num_pages": 1, "epoch": 1}
    assert Load(incarnation="a", counters={}, **fields).gauges == {}


def test_one_series_for_each_rank_and_none_of_a_rank_that_is_gone():
    metrics, router = Metrics("tiny"), Router()
    metrics.watch(Journal(request_timeout_s=60.0), router)
    for rank, name in enumerate("abc"):
        router.hello(
            Hello(incarnation=name, rank=rank, epoch=1, max_context_tokens=8, kv_pages=1), 0.0
        )
    router.view(ViewCommitted(incarnation="a", view=b"", members=["a", "b"], epoch=1))
    for name, rate in (("a", 30.0), ("b", 10.0), ("c", 99.0)):
        message = load_message(name, dispatch_rows_per_s=rate, expert_load_ratio=2.0, unknown=1.0)
        router.load(message, 0.0)
    shown = metrics.expose().decode()
    rows = [line for line in shown.splitlines() if line.startswith("moe_runtime_dispatch_rows_per")]
    assert rows == [
        'moe_runtime_dispatch_rows_per_second{engine="0",model_name="tiny"} 30.0',
        'moe_runtime_dispatch_rows_per_second{engine="1",model_name="tiny"} 10.0',
    ]
    assert 'moe_runtime_expert_load_ratio{engine="1",model_name="tiny"} 2.0' in shown
    assert "moe_runtime_rank_load_ratio 1.5" in shown
    assert "unknown" not in shown
