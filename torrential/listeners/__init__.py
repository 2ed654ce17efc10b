"""Objects that hear what happens in a run: listeners of the user's own, and loggers."""
