"""Planning: plugins, options, wiring, stage keys and cache status. Runs nothing."""
