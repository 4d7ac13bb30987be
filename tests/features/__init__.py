"""Runs of what Lightning's users rely on, by subject; each is registered as a case by its function's name."""
