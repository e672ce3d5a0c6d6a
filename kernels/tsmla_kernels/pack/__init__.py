"""K/V pack: concatenate, broadcast the rope part over heads, scale and cast to FP8."""
