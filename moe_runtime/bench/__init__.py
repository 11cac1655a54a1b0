"""Measurements that a user runs: `moe-runtime bench`. Columns: docs/bench-transfer.md."""
