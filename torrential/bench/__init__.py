"""Measurements of torrential itself, on real processes."""
