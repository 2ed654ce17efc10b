"""A training loop of one's own: the script computes, and a strategy's program wakes at `optimizer.step()`."""
