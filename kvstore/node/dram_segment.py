"""Memory of this process, in huge pages and near a NUMA node where that is configured."""

from __future__ import annotations

from kvstore.errors import SegmentUnusable, StoreClosed
from kvstore.node.kept_index import KeptIndex
from kvstore.node.node_index import NodeIndex
from kvstore.node.segment_memory import AddressableMemory
from kvstore.wire.messages import Medium
from transfer import Memory, allocate


class DramSegment(AddressableMemory):
    """See `SegmentMemory`. Peers of the same host map it.

    Args:
        nbytes: Its size.
        hugepages: Take huge pages where the machine has them.
        numa_node: Take the pages from this node while it has some; None: anywhere.
        medium: CXL if the node is one of CXL memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        hugepages: bool = True,
        numa_node: int | None = None,
        medium: Medium = Medium.DRAM,
    ) -> None:
        super().__init__(medium, nbytes)
        self._hugepages = hugepages
        self._numa_node = numa_node
        self._memory: Memory | None = None

    def open(self) -> KeptIndex:
        """Allocate.

        Raises:
            SegmentUnusable: There is not so much memory, or no such NUMA node.
        """
        what = f"{self._medium} segment"
        try:
            self._memory = allocate(
                self._nbytes, huge_pages=self._hugepages, numa_node=self._numa_node
            )
        except ValueError as error:
            expected = "a NUMA node of this machine"
            raise SegmentUnusable(path=what, expected=expected, seen=str(error)) from error
        except OSError as error:
            seen = error.strerror or str(error)
            raise SegmentUnusable(path=what, expected=f"{self._nbytes} bytes", seen=seen) from error
        self._array = self._memory.tensor.numpy()
        return KeptIndex(NodeIndex(self._nbytes))

    def lend(self) -> Memory:
        """Return the memory."""
        if self._memory is None:
            raise StoreClosed(what=f"{self._medium} segment", problem="not open")
        return self._memory

    def close(self) -> None:
        """Give the memory back; views of it stay valid."""
        memory, self._memory, self._array = self._memory, None, None
        if memory is not None:
            memory.close()
