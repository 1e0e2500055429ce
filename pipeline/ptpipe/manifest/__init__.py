"""Reading a manifest: YAML text to checked values, with the place of every word."""
