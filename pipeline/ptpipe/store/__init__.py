"""Storage: artifacts by content, the index, run records, atomic writes, locks."""
