"""Artifacts by content, written whole or not at all."""
