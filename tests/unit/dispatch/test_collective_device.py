"""Where messages of a process group have to be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dispatch.collective import device_of


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda:3")])
def test_nccl_wants_them_on_the_current_gpu(monkeypatch, backend: str, device: str):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of(None) == torch.device(device)
