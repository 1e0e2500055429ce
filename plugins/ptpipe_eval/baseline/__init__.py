"""Accepted models in small files that are committed, and runs that are judged against them. Imports no numpy."""
