"""How two engines meet, prove themselves, and stay connected while sockets come and go."""
