"""Models cut into stages: schedules of pipelines as data, their rehearsal in memory, profiles of layers, and plans."""
