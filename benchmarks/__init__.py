"""Timings beside hand-written torch; run from the top of the repository."""
