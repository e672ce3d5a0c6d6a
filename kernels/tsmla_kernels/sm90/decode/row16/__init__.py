"""The Hopper decode for requests of up to 16 query rows, of rows with scales and of bf16 rows that are gathered:
products of warps (`mma.sync`)."""
