"""What rounding does to each layer: the work of `quant.analyze`. Importing this imports neither torch nor numpy."""
