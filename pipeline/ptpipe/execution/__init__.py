"""Running a plan: the engine, its calls, reporters, records and past runs."""
