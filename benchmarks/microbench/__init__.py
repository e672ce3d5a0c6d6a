"""Microbenchmarks in CUDA C++ that the timing model of the emulator is calibrated with (docs/timing-model.md)."""
