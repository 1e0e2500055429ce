"""Which layers to keep float: the work of `quant.tune`. Importing this imports neither torch nor numpy."""
