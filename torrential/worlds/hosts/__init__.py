"""Roles on several hosts: an agent on each, which joins the supervisor, and what they say to each other."""
