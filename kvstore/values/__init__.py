"""Values of any kind by name, over the client of blocks."""
