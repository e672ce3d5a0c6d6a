"""The public functions that launch kernels, with the checks of their arguments."""
