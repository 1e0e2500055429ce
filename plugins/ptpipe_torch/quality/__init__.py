"""Statistics of how much worse a metric is on the same samples. Importing this imports no numpy."""
