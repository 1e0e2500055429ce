"""Statistics of how much worse one model is than another on the same samples. Importing this imports no numpy."""
