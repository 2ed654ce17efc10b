"""Measurements. Run from the root of the project: `python -m benchmarks.sync`, `.allreduce`, `.scaling`."""
