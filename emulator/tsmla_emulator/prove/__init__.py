"""Prove: calls held against float64, kernels changed one instruction at a time, other projects' kernels as controls."""
