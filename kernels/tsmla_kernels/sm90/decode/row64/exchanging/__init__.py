"""Attending where outputs lie as rows x dims: two warpgroups score tiles in turns, and exchange probabilities."""
