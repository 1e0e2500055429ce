"""Worker groups of parallel stages: collectives over process groups and shared memory."""
