"""Layers that are split over the workers of a group: which, how, and what they say to one another."""
