"""Streams of keys: how rows of each format come to shared memory as the Hopper decode multiplies them."""
