"""Real engines on small random models: what kernels are worth in use. Needs the engine, and a GPU."""
