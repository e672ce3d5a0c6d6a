"""Device parts for Blackwell: tcgen05 MMA, tensor memory, rows held by single threads."""
