"""Training with large batches: optimizers that rate each layer by itself, and what norm layers need."""
