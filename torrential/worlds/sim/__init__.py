"""The simulated world: real gradients, virtual time."""
