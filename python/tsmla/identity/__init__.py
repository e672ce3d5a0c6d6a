"""What a kernel is and takes: its variant, what exists of it, the plan and the table of its
calls. Standard library only."""
