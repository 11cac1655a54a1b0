"""The clock that an epoll loop waits for."""

from __future__ import annotations

import os
import select
import time

import pytest

from transfer.alarm import Alarm

pytestmark = pytest.mark.unit

SOON_S = 60.0


def readable(alarm: Alarm, timeout_s: float) -> bool:
    return bool(select.select([alarm.fileno()], [], [], timeout_s)[0])


def test_it_rings_once_and_not_before_its_time() -> None:
    alarm = Alarm()
    assert not readable(alarm, 0.0)
    begin = time.monotonic()
    alarm.set(0.05)
    assert readable(alarm, SOON_S)
    assert time.monotonic() - begin >= 0.05
    alarm.clear()
    assert not readable(alarm, 0.1)
    alarm.clear()  # without having rung
    alarm.close()


def test_only_the_last_setting_counts() -> None:
    alarm = Alarm()
    alarm.set(0.0)
    alarm.set(3600.0)
    assert not readable(alarm, 0.1)
    alarm.set(0.0)  # at once, not never
    assert readable(alarm, SOON_S)
    alarm.close()


def test_its_descriptor_is_freed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    alarm = Alarm()
    alarm.close()
    alarm.close()
    alarm.set(0.0)  # ignored
    assert alarm.fileno() == -1
    assert len(os.listdir("/proc/self/fd")) <= before
