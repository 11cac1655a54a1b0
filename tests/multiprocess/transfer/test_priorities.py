"""Messages of a dispatcher beside a bulk transfer that saturates the same rail: measured."""

from __future__ import annotations

import secrets

from tests.support.worker_process import Worker

MESSAGE_BYTES = 32 << 10
SECONDS = 2.0
# A noisy machine with few cores cannot keep the aim of 1.2; what it keeps is that nobody waits
# for the megabytes that are queued: those would be tens of milliseconds.
P50_RATIO_MAX = 20.0


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
    assert report["bulk_bytes_per_s"] > 1e7, "the bulk transfer does move"
    assert report["beside_p50_us"] < P50_RATIO_MAX * report["quiet_p50_us"], report
