"""From a manifest to a plan: vocabulary, options, wiring, keys and what is cached. Runs nothing."""
