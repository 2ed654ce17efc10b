"""Builds roles from a task and runs them: the worker's context, and the observer that evaluates and saves."""
