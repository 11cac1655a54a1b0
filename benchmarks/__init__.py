"""Figures with their command, commit and machine; never part of the tests."""
