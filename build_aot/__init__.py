"""Ahead-of-time build: every variant of the shipped matrix compiled, linked into libraries, audited. Needs no GPU."""
