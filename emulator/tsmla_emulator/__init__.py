"""Runs the PTX of CuTe DSL kernels on a CPU: values, asynchrony, happens-before, deadlocks and budgets."""
