"""What depends on torch's releases: `capabilities`, and the `patches`."""
