"""The command `tsmla`, which those who deploy run. No call of an operator needs it."""
