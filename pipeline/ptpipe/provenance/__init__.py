"""Provenance: statements read back, verified, signed; runs reproduced."""
