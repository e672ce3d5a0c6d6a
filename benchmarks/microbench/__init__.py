"""Microbenchmarks in CUDA C++ that calibrate the timing model of the emulator (emulator/docs/timing-model.md)."""
