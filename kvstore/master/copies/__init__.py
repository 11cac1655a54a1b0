"""Copies by a master's order: what it wants moved and why, and who makes which copy when."""
