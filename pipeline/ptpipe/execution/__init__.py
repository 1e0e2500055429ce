"""Execution of a plan: the engine, calls, launchers, reporters, run records, garbage collection."""
