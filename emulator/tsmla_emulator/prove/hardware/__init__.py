"""What a GPU left: records of kernels, instructions and products that ran on one, and the emulator beside them."""
