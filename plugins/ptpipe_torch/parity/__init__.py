"""Comparison of exported models with the torch models that they were made from."""
