"""Device parts that kernels are composed from; each answers one question for every operator and architecture."""
