"""How requests are split among the masters that share the keys, and their replies become one."""
