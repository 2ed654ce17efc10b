"""A Ray cluster as a driver sees it: the connection, its hosts, and what a run needs of them. It needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import ipaddress
import logging
import math
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torrential.errors import BadInput
from torrential.worlds.placement import Placement

SIOCGIFADDR = 0x8915
CONNECT_SECONDS = 0.5


class ClusterHost(NamedTuple):
    """One host of the cluster."""

    address: str
    port: int  # of its raylet
    id: str
    cpus: float
    gpus: float

    def answers(self) -> bool:
        """Whether its raylet can be reached: Ray itself takes up to a minute to find that a host is gone."""
        try:
            socket.create_connection((self.address, self.port), CONNECT_SECONDS).close()
        except OSError:
            return False
        return True


class Needs(NamedTuple):
    """The share of a host that Ray reserves for one agent and the workers there."""

    cpus: int
    gpus: float

    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def connect() -> bool:
    """Connect this process to a running cluster, unless it is; returns whether it was not."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput("--world ray needs the package ray, which is not installed; pip install 'torrential[ray]'")
    import ray

    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise BadInput("the driver of a run must be on a host of the cluster (given: ray://); use ray job submit")
        return False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError as error:
        if "Failed to connect" in str(error):
            raise BadInput(
                f"the Ray cluster does not answer this process: see that it runs, and that RAY_AUTH_MODE and the token "
                f"are alike everywhere ({first_line(error)})"
            ) from error
        raise BadInput(
            "there is no running Ray cluster that this host knows; begin one with ray start --head, and on other hosts "
            f"ray start --address=HOST:6379; or give its address in RAY_ADDRESS ({first_line(error)})"
        ) from error
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise BadInput(f"the Ray cluster does not take this process: {first_line(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would leave the run's directory without a last word
    return True


@contextlib.contextmanager
def on_cluster() -> Iterator[None]:
    """A block in which this process is connected to a running cluster."""
    own = connect()
    try:
        yield
    finally:
        if own:
            import ray

            ray.shutdown()


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def last_line(error: BaseException) -> str:
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]


def nodes() -> list[ClusterHost]:
    """The cluster's hosts that Ray takes to be alive."""
    import ray

    found: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return sorted(
        ClusterHost(
            node["NodeManagerAddress"],
            node["NodeManagerPort"],
            node["NodeID"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in found
    )


def needs_of(placement: Placement, hosts: int, workers: int, cpus: int, gpus: float) -> list[Needs]:
    """What each host's agent takes, given the CPUs and GPUs of a worker. A host without workers takes one CPU."""
    counts = [placement.count("worker", workers, host) for host in range(hosts)]
    return [Needs(max(1, count * cpus), _of_several(count * gpus)) for count in counts]


def _of_several(gpus: float) -> float:
    """Ray hands out a part of one GPU, or whole ones."""
    return gpus if gpus < 1 else float(math.ceil(gpus))


def fits(needs: Sequence[Needs], there: Sequence[ClusterHost]) -> bool:
    """Whether each agent could have a host of its own, if all of them were free."""
    free = sorted(((node.gpus, node.cpus) for node in there), reverse=True)
    for need in sorted(needs, key=lambda each: (each.gpus, each.cpus), reverse=True):
        enough = [node for node in free if node[0] >= need.gpus and node[1] >= need.cpus]
        if not enough:
            return False
        free.remove(min(enough))
    return True


def in_words(there: Sequence[ClusterHost]) -> str:
    return ", ".join(f"{node.address} with {node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in there) or "none"


def in_use(free: Mapping[str, float]) -> str:
    return f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs"


def address_of(interface: str) -> str:
    """The address of this host on a network, which an interface's name or the address itself says."""
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, request)[20:24])
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise BadInput(
            f"interface: {interface!r} has no address here (interfaces: {known}); give one that has"
        ) from error
