"""Plug-ins that make other libraries use tsmla. Each is imported by those who use that library; tsmla needs none."""
