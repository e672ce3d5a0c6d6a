"""Device code of tsmla, written in CuTe DSL: no torch, no file I/O. Shipped as source because the JIT compiles it."""
