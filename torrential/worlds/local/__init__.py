"""Roles as processes of this host, watched over by a supervisor."""
