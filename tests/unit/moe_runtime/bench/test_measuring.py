"""The clock is honest: an operation that ends before its bytes are there is caught."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from moe_runtime.bench.errors import BytesDiffer
from moe_runtime.bench.measuring import Measurer
from moe_runtime.bench.remote import LocalRemote, open_window
from moe_runtime.bench.workload import Case
from moe_runtime.cli import main
from tests.support.engines import new_engine
from transfer import Region, RegionKey, Transfer, TransferEngine, allocate

CASE = Case(operation="write", size=10_000, blocks=3, batch=1)


class Hasty:
    """An engine that says "done" before it is, as one without acknowledgements would."""

    def __init__(self, engine: TransferEngine, delay_s: float) -> None:
        self._engine = engine
        self._delay_s = delay_s
        self.late: list[threading.Timer] = []

    def write(self, *arguments: Any) -> Transfer:
        timer = threading.Timer(self._delay_s, self._engine.write, arguments)
        self.late.append(timer)
        timer.start()
        transfer = Transfer(peer="", operation="write", backend="hasty", nbytes=0, deadline=0.0)
        transfer.finish()
        return transfer


@pytest.fixture
def ends() -> Iterator[tuple[TransferEngine, LocalRemote, Region, RegionKey, Any]]:
    with new_engine(name=secrets.token_hex(8)) as engine:
        remote = LocalRemote(engine)
        memory = allocate(CASE.window_bytes)
        key, witness = open_window(remote, CASE.window_bytes, private=False)
        assert witness is not None
        yield engine, remote, engine.register(memory), key, witness
        remote.close()
        memory.close()


def measurer(ends: Any, engine: Any = None, **options: Any) -> Measurer:
    real, remote, region, key, witness = ends
    return Measurer(engine or real, remote, region, key, witness=options.get("witness", witness),
                    options={}, prepared=False, same_host=True)  # fmt: skip


@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_good_engine_passes(ends: Any, operation: str, batch: int) -> None:
    case = Case(operation=operation, size=1000, blocks=2, batch=batch)
    row = measurer(ends).measure(case, 0.02)
    assert row.operations >= batch
    assert row.backend == "local"
    assert row.checked == {"write": "seen", "read": "own"}[operation]
    assert 0 < row.p50_us <= row.p99_us <= row.p999_us
    assert row.gb_s == pytest.approx(row.ops_s * case.nbytes / 1e9)
    # Operations in flight overlap; one after another they cannot take longer than the clock ran.
    assert row.p50_us * 1e-6 * row.operations / batch < 2 * row.seconds


def test_bytes_that_come_late_are_caught(ends: Any) -> None:
    hasty = Hasty(ends[0], delay_s=0.3)
    try:
        with pytest.raises(BytesDiffer, match="does not hold what was sent"):
            measurer(ends, hasty).measure(CASE, 0.01)
    finally:
        assert hasty.late
        for timer in hasty.late:
            timer.cancel()
            timer.join()


def test_the_target_itself_catches_them_too(ends: Any) -> None:
    hasty = Hasty(ends[0], delay_s=0.3)
    try:
        with pytest.raises(BytesDiffer):
            measurer(ends, hasty, witness=None).measure(CASE, 0.01)
    finally:
        for timer in hasty.late:
            timer.cancel()
            timer.join()


@pytest.mark.parametrize(
    ("ending", "status"), [(KeyboardInterrupt(), 130), (OSError("no more"), 1)]
)
def test_what_was_measured_is_shown_when_a_later_row_is_not(
    monkeypatch: pytest.MonkeyPatch, ending: BaseException, status: int
) -> None:
    measure, begun = Measurer.measure, []

    def only_once(self: Measurer, *arguments: Any) -> Any:
        begun.append(arguments)
        if len(begun) > 1:
            raise ending
        return measure(self, *arguments)

    monkeypatch.setattr(Measurer, "measure", only_once)
    options = ["--backend", "local", "--op", "write", "--sizes", "4K,64K", "--seconds", "0.02"]
    result = CliRunner().invoke(main, ["bench", "transfer", *options])
    assert len(begun) == 2, result.output
    assert result.exit_code == status
    assert "4K" in result.stdout
    assert "64K" not in result.stdout
