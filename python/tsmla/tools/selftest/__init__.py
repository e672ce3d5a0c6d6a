"""`tsmla selftest`: runs every kernel in processes of their own, with time limits, and reports."""
