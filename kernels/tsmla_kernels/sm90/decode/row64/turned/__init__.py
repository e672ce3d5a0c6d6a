"""Attending where value products are turned: outputs lie as dims x rows, and values are the operand in registers."""
