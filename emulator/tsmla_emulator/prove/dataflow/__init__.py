"""What machine code does with registers on every way through it, told without running it."""
