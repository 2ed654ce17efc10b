"""Who takes part in a run: one pure state machine that every world drives (machine.py)."""
