"""The agents of a run on a Ray cluster, one on each host: begun, asked to take part in a run, replaced, ended.

    driver ── placement group, one bundle for each host ──► Ray ── begins ──► agents
    driver ── meeting, the packed job ───────────────────► agents ── join ──► supervisor      (worlds/hosts)

Where Ray has a host for each agent is its matter; whether agents are alive is known from their own connections.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from torrential.config import RaySettings
from torrential.errors import BadInput, RunFailed
from torrential.options import make
from torrential.worlds.hosts.rendezvous import Rendezvous
from torrential.worlds.placement import Placement, read_wishes
from torrential.worlds.ray import cluster
from torrential.worlds.ray.agent import Agent
from torrential.worlds.ray.cluster import ClusterHost, Needs

PLACE_SECONDS = 30.0  # until the agents' share of the cluster is free
BEGIN_SECONDS = 60.0
LEAVE_SECONDS = 3.0


def agents_for(options: dict[str, Any], workers: int, kept: bool = False) -> Agents:
    """The agents of a run with these options; those that are not this world's are for others to look at."""
    own = {name: value for name, value in options.items() if name in RaySettings.__struct_fields__}
    return Agents(make(RaySettings, own), workers, kept)


class Agents:
    def __init__(self, settings: RaySettings, workers: int, kept: bool = False) -> None:
        """`kept`: until `close`, over several runs; else the first run's end is theirs."""
        self.kept = kept
        self._own_connection = cluster.connect()
        self._group: Any = None
        self._agents: dict[int, Any] = {}  # the newest, by number of the host
        self._nodes: dict[int, ClusterHost] = {}
        self._where: dict[int, dict[str, Any]] = {}  # how Ray is told where each is to be
        self._following: dict[int, Any] = {}
        self._replacing = threading.Lock()
        try:
            self._needs = self._choose(settings, workers)
            self.hosts = len(self._needs)
            self.interface = self._interface(settings)
            self._place()
        except BaseException:
            self.close()
            raise

    def _interface(self, settings: RaySettings) -> str:
        import ray

        if settings.interface is None:
            return str(ray.util.get_node_ip_address())
        return cluster.address_of(settings.interface)

    # -- where ----------------------------------------------------------------------------------------------------
    def _choose(self, settings: RaySettings, workers: int) -> list[Needs]:
        """What each host is to have, on as many hosts as were asked for, or on the fewest."""
        there, asked = cluster.nodes(), settings.hosts
        if asked is not None and asked > workers:
            raise BadInput(f"more hosts than workers (hosts: {asked}, workers: {workers}); use --set hosts={workers}")
        if asked is not None and asked > len(there):
            raise BadInput(
                f"too few hosts (asked for: {asked}, in the Ray cluster: {len(there)}); begin Ray on more, "
                f"or use --set hosts={len(there)}"
            )
        most = min(workers, len(there))
        for hosts in range(1, most + 1) if asked is None else [asked]:
            needs = self._needs_on(hosts, settings, workers)
            if cluster.fits(needs, there):
                return needs
        each = f"{settings.cpus_per_worker} CPUs" + (
            f" and {settings.gpus_per_worker:g} GPUs" * (settings.gpus_per_worker > 0)
        )
        many = "" if asked is None else f" on {asked} hosts"
        raise BadInput(
            f"{workers} workers with {each} each{many} do not fit the Ray cluster (hosts: {cluster.in_words(there)}); "
            "use fewer workers, or begin Ray on more hosts"
        )

    def _needs_on(self, hosts: int, settings: RaySettings, workers: int) -> list[Needs]:
        counts = {"worker": workers}
        known = [part for part in settings.placement.split(",") if part.strip().startswith("worker")]
        placement = Placement(hosts, counts, read_wishes(",".join(known), hosts, counts))
        return cluster.needs_of(placement, hosts, workers, settings.cpus_per_worker, settings.gpus_per_worker)

    def _place(self) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = placement_group([need.resources() for need in self._needs], strategy="STRICT_SPREAD")
        if not self._group.wait(PLACE_SECONDS):
            raise BadInput(
                f"others use what {self.hosts} hosts for this run need: within {PLACE_SECONDS:.0f} s there were "
                f"{cluster.in_use(ray.available_resources())} free in all; try again later, or use fewer workers"
            )
        for number in range(self.hosts):
            self._where[number] = {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number)}
            self._begin(number)

    def _begin(self, number: int) -> None:
        import ray

        need = self._needs[number]
        options = {"num_cpus": need.cpus, "num_gpus": need.gpus, "max_restarts": 0} | self._where[number]
        self._agents[number] = ray.remote(Agent).options(**options).remote(number)

    def await_begun(self) -> None:
        """Wait for all agents; raise what is wrong with one that did not come up."""
        known = {node.id: node for node in cluster.nodes()}
        asked = {number: agent.node.remote() for number, agent in self._agents.items()}
        for number, node in asked.items():
            self._nodes[number] = known[self._answer(number, node)]

    def _answer(self, number: int, said: Any) -> Any:
        import ray

        try:
            return ray.get(said, timeout=BEGIN_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise RunFailed(f"the agent of host {number} did not begin within {BEGIN_SECONDS:.0f} s") from error
        except ray.exceptions.RayError as error:
            raise RunFailed(f"the agent of host {number} did not begin: {cluster.last_line(error)}") from error

    # -- a run ----------------------------------------------------------------------------------------------------
    def follow(self, number: int, meeting: Rendezvous, packed: Sequence[Any]) -> None:
        """Have a host's agent take part in a run. `packed`: the job, as references to Ray's object store."""
        self._following[number] = self._agents[number].follow.remote(meeting._replace(host=number), *packed)

    def check(self) -> None:
        """Raise what has ended an agent that should be taking part."""
        import ray

        done, _ = ray.wait(list(self._following.values()), timeout=0)
        for number, said in self._following.items():
            if said in done:
                raise RunFailed(f"host {number} has left before the run began: {self._answer(number, said)}")

    def replace(self, number: int, meeting: Rendezvous, packed: Sequence[Any]) -> None:
        """Begin another agent in the place of one that is lost, in a thread of its own: on the same host if that is
        there, else on one that has none."""
        threading.Thread(target=self._replace, args=(number, meeting, packed), daemon=True).start()

    def _replace(self, number: int, meeting: Rendezvous, packed: Sequence[Any]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._replacing, contextlib.suppress(ray.exceptions.RayError):  # the roles begin elsewhere in the end
            ray.kill(self._agents[number])
            elsewhere = not self._nodes[number].answers()
            if elsewhere:
                taken = ",".join(node.id for node in self._nodes.values())
                self._where[number] = {"label_selector": {"ray.io/node-id": f"!in({taken})"}}
            self._begin(number)
            node = self._agents[number].node.remote()
            # Ray might fetch the job from the lost host, for half a minute; of what is put now it knows no other copy.
            self.follow(number, meeting, [ray.put(ray.get(part)) for part in packed])
            if elsewhere:
                there = ray.get(node)
                self._nodes[number] = next(node for node in cluster.nodes() if node.id == there)
                self._where[number] = {"scheduling_strategy": NodeAffinitySchedulingStrategy(there, soft=False)}

    # -- the end --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End all agents. Safe to call twice."""
        import ray

        if not ray.is_initialized():
            return
        with contextlib.suppress(ray.exceptions.RayError):
            if self._following:  # agents end what they began
                ray.wait(list(self._following.values()), num_returns=len(self._following), timeout=LEAVE_SECONDS)
            for agent in self._agents.values():
                ray.kill(agent)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._agents, self._following, self._group = {}, {}, None
        if self._own_connection:
            ray.shutdown()
