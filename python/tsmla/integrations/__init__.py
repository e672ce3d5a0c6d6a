"""Plug-ins for software that runs models: each module is imported by its host, and imports it; tsmla needs none."""
