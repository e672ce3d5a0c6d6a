"""Run: kernels' PTX on the CPU, behind the real host code."""
