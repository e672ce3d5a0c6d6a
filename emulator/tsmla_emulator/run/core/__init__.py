"""The interpreter in C++: its sources, how they are built, and its ctypes face."""
