"""Where parameters live and who updates them: one shared copy updated in slices, or a copy with every worker."""
