"""Key masks of a masked prefill, from lists of the keys that query tokens have chosen."""
