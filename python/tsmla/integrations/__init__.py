"""tsmla inside of other libraries: each module is imported by those who use that library; tsmla needs none."""
