"""The attention calls of `check`: their inputs, and what they must give."""
