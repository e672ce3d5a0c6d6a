"""Absorbed MLA decode over a paged cache for Hopper."""
