"""Measurements on a GPU, and pages written from them: `python -m benchmarks` lists the commands."""
