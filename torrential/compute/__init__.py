"""How a step is computed: what is kept for backward and what is computed again, and what that takes of memory."""
