"""Operators in plain PyTorch. The text of each module is the reference of a definition, so it imports torch only."""
