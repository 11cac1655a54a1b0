"""A bank of small experts whose bytes follow from their name, in slabs of four places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.expert_source import ExpertId, place_of


@dataclass
class PlainSlab:
    tensor: torch.Tensor


def plain_slab(nbytes: int) -> PlainSlab:
    return PlainSlab(torch.zeros(nbytes, dtype=torch.uint8))


def bytes_of(expert: ExpertId, nbytes: int) -> torch.Tensor:
    """What the weights of this expert are: uint8 [nbytes]."""
    generator = torch.Generator().manual_seed(expert[0] * 1_000_003 + expert[1])
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class SmallBank:
    def __init__(self, nbytes: int = 64, allocate: Callable[[int], Any] = plain_slab) -> None:
        self.nbytes, self.allocate = nbytes, allocate
        self.slabs: list[Any] = []
        self.places: dict[ExpertId, tuple[int, int, int]] = {}
        self.complete: set[ExpertId] = set()

    def has(self, layer: int, logical: int) -> bool:
        return (layer, logical) in self.complete

    def location(self, layer: int, logical: int) -> tuple[int, int, int]:
        return self.places[layer, logical]

    def memories(self) -> Sequence[Any]:
        return self.slabs

    def reserve(self, layer: int, logical: int) -> torch.Tensor:
        if (layer, logical) not in self.places:
            index = len(self.places)
            if index % 4 == 0:
                self.slabs.append(self.allocate(4 * self.nbytes))
            self.places[layer, logical] = (index // 4, index % 4 * self.nbytes, self.nbytes)
        self.complete.discard((layer, logical))
        return place_of(self, (layer, logical))

    def ready(self, layer: int, logical: int) -> None:
        self.complete.add((layer, logical))
