"""Finds the compiled kernel of a variant: libraries and their manifests, the compile cache, the compiler."""
