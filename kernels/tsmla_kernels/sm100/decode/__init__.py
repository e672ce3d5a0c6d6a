"""Absorbed MLA decode over a paged cache for Blackwell."""
