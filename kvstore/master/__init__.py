"""What one master knows of the pool and decides: a pure state machine, and the shell around it."""
