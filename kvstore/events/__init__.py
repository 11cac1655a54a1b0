"""Who is told which blocks come and go: the log of changes, its replay, the sockets."""
