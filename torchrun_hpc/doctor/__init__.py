"""A doctor for the allocation."""
