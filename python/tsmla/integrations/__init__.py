"""tsmla inside of other libraries: one module each, imported by those who use that library."""
