"""Calls of each operator as data: edge cases, their inputs, and what results must be. The selftest and the emulator's
checks run them; no call of an operator needs them."""
