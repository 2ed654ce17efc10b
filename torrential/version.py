"""The version, in the one place that everything can read without loading anything else."""

__version__ = "0.1.0"
