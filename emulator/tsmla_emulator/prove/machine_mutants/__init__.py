"""Changes one instruction of a kernel's machine code at a time, and tells which changes are noticed."""
