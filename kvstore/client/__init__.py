"""A process's access to the pool: reading, writing, and what stands between."""
