"""Judge what a manifest makes over several seeds, and not one file of it. Imports no numpy."""
