"""Tasks: what a data set asks of a model."""
