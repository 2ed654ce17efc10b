"""What one role can say to another: the Comm protocol, the wire, and the first collectives."""
