"""Cache rows: write them from what projections produce, and read them back."""
