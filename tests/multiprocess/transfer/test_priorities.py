"""Messages of a dispatcher beside a bulk transfer that saturates the same rail: they pass it."""

from __future__ import annotations

import secrets

from tests.support.worker_process import Worker

MESSAGE_BYTES = 32 << 10
SECONDS = 2.0
# Three writes of bulk are under way at any time: whoever queued behind them would see at least two
# of them done before itself.
BULK_BYTES = 8 << 20


def test_messages_pass_a_saturating_bulk_transfer() -> None:
    owner = Worker(role="owner", name=secrets.token_hex(8), rails=["127.0.0.1"])
    asker = Worker(role="compare", name=secrets.token_hex(8), rails=["127.0.0.1"],
                   seconds=SECONDS, message_bytes=MESSAGE_BYTES)  # fmt: skip
    try:
        told, asking = owner.hear(), asker.hear()
        owner.say(name=asking["name"])
        asker.say(**told, **owner.hear())
        assert asker.hear()["started"]
        report = asker.hear()
    finally:
        owner.end()
        asker.end()
    ratio = report["beside_p99_us"] / report["quiet_p99_us"]
    print(f"\np99 beside bulk / quiet: {ratio:.2f}; {report}")
    assert report["bulk_bytes"] >= BULK_BYTES, "the bulk transfer does move"
    assert report["passed_p50"] < BULK_BYTES, report
