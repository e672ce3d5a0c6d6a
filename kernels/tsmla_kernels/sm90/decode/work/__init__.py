"""Work of the Hopper decode: one warp asks the work line and tells the other warps their tasks."""
