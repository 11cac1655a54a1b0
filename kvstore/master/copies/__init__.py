"""Copies by a master's order: what it wants moved and why, and who makes which copy when.

They work on the `Catalog`, in rows of `kvstore/master/books/copy_table.py`: one row, a small int,
per copy of a block.

    copies(key) -> [row]                   committed copies of a block
    table.rows_in(index, COMMITTED)        committed copies in one segment; O(all rows)
    open_copy(row, target, now) -> id      space in segment `target` for another copy of this
                                           block, written by the node of `row`, whose bytes stay
                                           in place meanwhile; None: no room (nothing is evicted)
    commit_copy(id) -> bool                it is written and verified; False: too late, or gone
    abort_copy(id, at_rest=...)            at_rest: nothing is under way, the space is free again;
                                           else it is quarantined until the source node is dead
    drop(row)                              one copy goes (the block with its last)
    observers: list[PoolObserver]          told of stored(rows), hit(rows), evicted(rows),
                                           dropped(row), joined(segment), left(segment)
    nodes_with_work: set[str]              who is told by `Known.copies` to ask for work

A copy counts as an open put of the source node: a fenced node's copies are quarantined, those of
a dead one freed, those into a lost segment forgotten (`commit_copy` is False then). One that takes
longer than `MasterTiming.put_s` is quarantined.
"""
