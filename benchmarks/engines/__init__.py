"""Real engines on small random models: what kernels are worth where they are used. Needs the engine, and a GPU."""
