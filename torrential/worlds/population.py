"""The roles of a run and what their deaths mean, as a world tells its membership."""

from __future__ import annotations

from torrential.membership.roles import Members
from torrential.worlds.base import Job


def population(job: Job) -> list[Members]:
    """The roles that the strategy declares, and the observer that every run has."""
    declared = job.strategy.roles(job.config.workers, job.config.servers)
    return [*(Members(role.name, role.count, role.death) for role in declared), Members("observer", 1, "restart")]
