"""What travels between clients, nodes and masters, and a client's or node's way to its master."""
