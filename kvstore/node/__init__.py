"""The lending side: memory given to the pool, and what its owner remembers of it."""
