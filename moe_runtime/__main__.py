"""`python -m moe_runtime`: the command without its installed script."""

from __future__ import annotations

from moe_runtime.cli import main

if __name__ == "__main__":
    main()
