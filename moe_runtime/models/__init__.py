"""Model execution: checkpoints, expert weights, the paged KV cache and the forward step."""
