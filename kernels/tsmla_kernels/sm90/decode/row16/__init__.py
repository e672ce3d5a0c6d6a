"""The Hopper decode of rows with scales for requests of up to 16 query rows: products of warps (`mma.sync`)."""
