"""Ragged attention forward for Hopper."""
