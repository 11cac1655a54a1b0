"""Device memory on real GPUs: copies, streams, and another process's memory through CUDA IPC."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.engines import BOTH, SECRET, new_engine, new_name, offer
from transfer import RegionKey
from transfer.backends.cuda_runtime import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

NBYTES = (9 << 20) + 321
SOON_S = 60.0


def test_the_runtime_loads() -> None:
    driver = load()
    assert len(driver.uuids()) == torch.cuda.device_count()
    assert driver.can_access(0, 0)


def test_own_device_memory() -> None:
    device = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda")
    back = torch.zeros(NBYTES, dtype=torch.uint8)
    with new_engine() as engine:
        region, host = engine.register(device), engine.register(back)
        assert region.kind == "cuda:0"
        key = offer(engine, region, engine)
        engine.read(engine.name, host, key, 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(back, device.cpu())
        back.random_()
        engine.write(engine.name, host, key, 5, 0, 1_000_000).wait(SOON_S)
        assert torch.equal(device[:1_000_000].cpu(), back[5:1_000_005])
        other = torch.zeros_like(device)
        engine.write(
            engine.name, region, offer(engine, engine.register(other), engine), 0, 0, NBYTES
        ).wait(SOON_S)
        assert torch.equal(other, device)


def test_copies_follow_what_the_caller_has_queued() -> None:
    """The kernel that makes the bytes is still running when the write is called."""
    size = 4096
    matrix = torch.rand(size, size, device="cuda")
    target = torch.zeros(size * size * 4, dtype=torch.uint8)
    with new_engine() as engine:
        result = torch.empty_like(matrix)
        region, host = engine.register(result), engine.register(target)
        key = offer(engine, host, engine)
        for _ in range(20):
            torch.mm(matrix, matrix, out=result)
        result.fill_(3.0)
        engine.write(engine.name, region, key, 0, 0, target.numel()).wait(SOON_S)
    assert bool((target.view(torch.float32) == 3.0).all())


def _own(pipe: Connection, name: str) -> None:
    with new_engine("shared_memory", name=name) as engine:
        memory = torch.full((NBYTES,), 17, dtype=torch.uint8, device="cuda")
        region = engine.register(memory)
        pipe.send(engine.address)
        key = engine.offer(region, to=pipe.recv(), access=BOTH, offset=1000, nbytes=NBYTES - 1000)
        pipe.send(key.encode())
        pipe.recv()
        pipe.send(memory.cpu().numpy().tobytes())
        pipe.recv()


def test_memory_of_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    name = new_name()
    process = context.Process(target=_own, args=(theirs, name))
    process.start()
    try:
        with new_engine("shared_memory", secret=SECRET) as engine:
            engine.connect(ours.recv())
            ours.send(engine.name)
            key = RegionKey.decode(ours.recv())
            device = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
            region = engine.register(device)
            engine.read(name, region, key, 0, 0, key.nbytes).wait(SOON_S)
            assert bool((device[: key.nbytes] == 17).all())
            device.random_(0, 256)
            engine.write(name, region, key, 0, 100, 5_000_000).wait(SOON_S)
            assert engine._staging._windows._windows, "opened through CUDA IPC"
            ours.send("show")
            shown = torch.frombuffer(bytearray(ours.recv()), dtype=torch.uint8)
            assert torch.equal(shown[1100:5_001_100], device[:5_000_000].cpu())
            assert bool((shown[:1100] == 17).all())
            ours.send("end")
    finally:
        process.join(SOON_S)
        process.kill()
        process.join()
    assert process.exitcode == 0
