"""Where roles run, and what time means there."""
