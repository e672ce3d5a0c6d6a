"""Operators by tsmla. The text of each module is a solution's source."""
