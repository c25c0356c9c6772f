"""The changes inside torch: one file for each."""
