"""key -> block: the committed blocks and where their copies are."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvstore.errors import InvariantViolated
from kvstore.master.block import Block, Extent, ExtentState


class BlockIndex:
    """All committed blocks. A block is here exactly as long as it has a copy. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> Block | None:
        """Return the block of this name."""
        return self._blocks.get(key)

    def attach(self, extent: Extent, *, checksum: int) -> bool:
        """Enter a committed copy.

        Returns:
            False if other bytes of this name, or another copy on this node, are there.
        """
        assert extent.state is ExtentState.COMMITTED, extent
        block = self._blocks.get(extent.key)
        if block is None:
            block = Block(key=extent.key, nbytes=extent.nbytes, checksum=checksum)
            self._blocks[extent.key] = block
        elif (block.nbytes, block.checksum) != (
            extent.nbytes,
            checksum,
        ) or extent.node in block.replicas:
            return False
        block.replicas[extent.node] = extent
        return True

    def detach(self, extent: Extent) -> None:
        """Forget one copy, and the block with its last one."""
        block = self._blocks[extent.key]
        assert block.replicas.get(extent.node) is extent, extent
        del block.replicas[extent.node]
        if not block.replicas:
            del self._blocks[extent.key]

    def choose(self, key: bytes, *, reader: str, avoid: Collection[str]) -> Extent | None:
        """Return the copy that this reader should use: its own node's, else any it can reach."""
        block = self._blocks.get(key)
        if block is None:
            return None
        own = block.replicas.get(reader)
        if own is not None:
            return own
        return next((e for node, e in block.replicas.items() if node not in avoid), None)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless every block has copies that are its own."""
        for block in self:
            if not block.replicas:
                self._fail(block, "has no copy")
            for node, extent in block.replicas.items():
                if extent.node != node or extent.key != block.key:
                    self._fail(block, f"claims the extent of {extent.key.hex()} on {extent.node}")
                if extent.state is not ExtentState.COMMITTED or extent.nbytes != block.nbytes:
                    self._fail(block, f"has a copy that is {extent.state}, {extent.nbytes} bytes")

    @staticmethod
    def _fail(block: Block, problem: str) -> None:
        raise InvariantViolated(where=f"block {block.key.hex()}", problem=problem)
