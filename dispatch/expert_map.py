"""Where the experts live: which rank holds which logical experts, layer by layer.

Any split is legal: uneven ones, several instances of an expert, ranks without experts, and experts
that nobody holds (`missing`). A map is a value: immutable, compared by content, without torch.

    E = 8, ranks 0, 1, 2                         even, layer 0        even, layer 1
    (the two experts left over move on           0: 0 1 2             0: 0 1 2
    from layer to layer, so that memory          1: 3 4 5             1: 3 4
    stays balanced)                              2: 6 7               2: 5 6 7
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch.errors import PlacementInvalid

LayerExperts = tuple[tuple[int, ...], ...]  # per layer, the logical experts of one rank
Owners = tuple[tuple[int, ...], ...]  # per logical expert, the ranks that hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMap:
    """The placement of `num_logical` experts in each of `num_layers` layers.

    Layers are counted over the layers with experts only. Safe to share between threads.

    Attributes:
        num_layers: Layers with experts.
        num_logical: Experts of a layer.
        placement: Rank -> per layer the logical experts it holds; ascending in both.

    Raises:
        PlacementInvalid: From the constructor, if the placement contradicts the numbers.
    """

    num_layers: int
    num_logical: int
    placement: Mapping[int, LayerExperts]
    _owners: dict[int, Owners] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_layers < 0 or self.num_logical < 1:
            raise PlacementInvalid(
                problem=f"{self.num_layers} layers of {self.num_logical} experts"
            )
        normal = {
            int(rank): self._normal(rank, self.placement[rank]) for rank in sorted(self.placement)
        }
        object.__setattr__(self, "placement", normal)

    def _normal(self, rank: int, layers: Sequence[Sequence[int]]) -> LayerExperts:
        if rank < 0:
            raise PlacementInvalid(problem=f"rank {rank}, expected >= 0")
        if len(layers) != self.num_layers:
            raise PlacementInvalid(
                problem=f"rank {rank} has {len(layers)} layers, expected {self.num_layers}"
            )
        normal = tuple(tuple(sorted(map(int, experts))) for experts in layers)
        for layer, experts in enumerate(normal):
            if len(set(experts)) != len(experts):
                raise PlacementInvalid(problem=f"rank {rank}, layer {layer}: an expert twice")
            if experts and not 0 <= experts[0] <= experts[-1] < self.num_logical:
                raise PlacementInvalid(
                    problem=f"rank {rank}, layer {layer}: experts {experts[0]}..{experts[-1]}, "
                    f"expected 0..{self.num_logical - 1}"
                )
        return normal

    @classmethod
    def even(cls, *, num_layers: int, num_logical: int, ranks: Sequence[int]) -> ExpertMap:
        """Return the map with every expert once, in runs as equal as they can be.

        Args:
            num_layers: Layers with experts.
            num_logical: Experts of a layer; may be fewer than the ranks.
            ranks: Who takes part, in any order, each once.

        Raises:
            PlacementInvalid: No ranks, a rank twice, or impossible numbers.
        """
        ordered = sorted(ranks)
        if not ordered or len(set(ordered)) != len(ordered):
            raise PlacementInvalid(problem=f"ranks {list(ranks)}, expected some, each once")
        share, left_over = divmod(num_logical, len(ordered))
        placement: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in ordered}
        for layer in range(num_layers):
            begin = 0
            for position, rank in enumerate(ordered):
                extra = (position - layer * left_over) % len(ordered) < left_over
                end = begin + share + extra
                placement[rank].append(tuple(range(begin, end)))
                begin = end
        return cls(
            num_layers=num_layers,
            num_logical=num_logical,
            placement={rank: tuple(layers) for rank, layers in placement.items()},
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the map, ascending, those without experts included."""
        return tuple(self.placement)

    def experts_of(self, rank: int, layer: int) -> tuple[int, ...]:
        """Return the logical experts that `rank` holds in `layer`, ascending.

        Raises:
            KeyError: The map does not know the rank.
            IndexError: There is no such layer.
        """
        return self.placement[rank][layer]

    def owners(self, layer: int, logical: int) -> tuple[int, ...]:
        """Return the ranks that hold an expert, ascending; empty if it is missing."""
        return self._owners_of(layer)[logical]

    def _owners_of(self, layer: int) -> Owners:
        found = self._owners.get(layer)
        if found is None:
            lists: list[list[int]] = [[] for _ in range(self.num_logical)]
            for rank, layers in self.placement.items():
                for logical in layers[layer]:
                    lists[logical].append(rank)
            found = self._owners[layer] = tuple(map(tuple, lists))
        return found

    def route(self, layer: int, source_rank: int) -> npt.NDArray[np.int64]:
        """Return where `source_rank` sends each logical expert's tokens.

        An own instance is preferred. Otherwise the sources are spread over the instances by
        source rank and expert, the same on every rank that asks.

        Returns:
            [E] int64: a rank, or -1 for an expert that nobody holds. A fresh array.
        """
        target = np.full(self.num_logical, -1, dtype=np.int64)
        for logical, owners in enumerate(self._owners_of(layer)):
            if source_rank in owners:
                target[logical] = source_rank
            elif owners:
                target[logical] = owners[(source_rank + logical) % len(owners)]
        return target

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Return the (layer, logical) pairs that no rank holds, ascending."""
        return tuple(
            (layer, logical)
            for layer in range(self.num_layers)
            for logical, owners in enumerate(self._owners_of(layer))
            if not owners
        )

    def without(self, ranks: Iterable[int]) -> ExpertMap:
        """Return the map of the other ranks; experts that only `ranks` held become missing."""
        removed = set(ranks)
        return ExpertMap(
            num_layers=self.num_layers,
            num_logical=self.num_logical,
            placement={r: layers for r, layers in self.placement.items() if r not in removed},
        )

    def assign(self, instances: Mapping[tuple[int, int], int]) -> ExpertMap:
        """Return the map with one more instance per entry.

        Args:
            instances: (layer, logical) -> rank; a new rank joins the map. Holding it already is
                no error.

        Raises:
            PlacementInvalid: There is no such layer or expert.
        """
        layers_of = {
            rank: [set(experts) for experts in layers] for rank, layers in self.placement.items()
        }
        for (layer, logical), rank in instances.items():
            if not 0 <= layer < self.num_layers:
                raise PlacementInvalid(problem=f"layer {layer}, expected 0..{self.num_layers - 1}")
            mine = layers_of.setdefault(rank, [set() for _ in range(self.num_layers)])
            mine[layer].add(logical)
        return ExpertMap(
            num_layers=self.num_layers,
            num_logical=self.num_logical,
            placement={
                rank: tuple(tuple(sorted(experts)) for experts in layers)
                for rank, layers in layers_of.items()
            },
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the map as JSON-able values, experts as half-open runs.

        `"0": [[48, [0, 32]]]` reads: rank 0 holds `[0, 32)` in each of 48 layers in a row.
        """
        return {
            "num_layers": self.num_layers,
            "num_logical": self.num_logical,
            "placement": {
                str(rank): [[len(list(same)), _runs(experts)] for experts, same in groupby(layers)]
                for rank, layers in self.placement.items()
            },
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ExpertMap:
        """Read what `to_wire` returned.

        Raises:
            PlacementInvalid: The values are not a map.
        """
        try:
            num_layers, num_logical = int(wire["num_layers"]), int(wire["num_logical"])
            placement = {
                int(rank): _layers(groups, num_layers, num_logical)
                for rank, groups in wire["placement"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlacementInvalid(problem=f"cannot be read: {error!r}") from error
        return cls(num_layers=num_layers, num_logical=num_logical, placement=placement)


def _runs(experts: Sequence[int]) -> list[int]:
    bounds: list[int] = []
    for expert in experts:
        if bounds and bounds[-1] == expert:
            bounds[-1] = expert + 1
        else:
            bounds += [expert, expert + 1]
    return bounds


def _layers(groups: Iterable[Sequence[Any]], num_layers: int, num_logical: int) -> LayerExperts:
    layers: list[tuple[int, ...]] = []
    for repeat, bounds in groups:
        # Bounded before it is expanded: the record comes from outside this process.
        if not 0 < repeat <= num_layers - len(layers):
            raise ValueError(f"{repeat} more layers after {len(layers)} of {num_layers}")
        if any(not 0 <= bound <= num_logical for bound in bounds):
            raise ValueError(f"runs {bounds} of {num_logical} experts")
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        experts = tuple(expert for begin, end in pairs for expert in range(begin, end))
        layers += [experts] * repeat
    return tuple(layers)
