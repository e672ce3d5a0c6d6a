"""Ragged attention forward for Blackwell."""
