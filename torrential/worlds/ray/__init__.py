"""Roles on the hosts of a Ray cluster: Ray begins an agent on each, and everything else is as in worlds/hosts."""
