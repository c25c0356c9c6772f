"""Everything that depends on torch's release: `capabilities`, and the `patches`."""
