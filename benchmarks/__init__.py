"""Measurements on a GPU, one runner per operator: `python -m benchmarks.bench_pack`, `... .cold_start`."""
