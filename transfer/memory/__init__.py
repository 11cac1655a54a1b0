"""Memory that the engine may touch: made, registered, offered, told to peers."""
