"""The roles of a run and what their deaths mean, as a world tells its membership."""

from __future__ import annotations

from torrential.membership.roles import Death, Members
from torrential.worlds.base import Job


def population(job: Job) -> list[Members]:
    config, served = job.config, job.strategy.served
    death: Death = "view" if served else "regroup"
    found = [Members("worker", config.workers, death), Members("observer", 1, "restart")]
    if served:
        found.append(Members("server", config.servers, "view"))
    return found
