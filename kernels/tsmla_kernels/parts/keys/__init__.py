"""Keys of the paged cache: where they lie, which of them rows see, how boxes of them are copied, what scales become."""
