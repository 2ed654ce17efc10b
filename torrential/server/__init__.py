"""The parameter server: a replicated state machine over ranges of a flat vector, and the client that talks to it."""
