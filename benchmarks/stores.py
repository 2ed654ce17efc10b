"""The contenders of benchmarks/server.py: each keeps a vector of float32 in another process and lets it be changed.

A contender is a process (`python -m benchmarks.stores KIND ...`); each of its workers calls the driver, says its
contender's name, and then does what it is asked: an operation, so many times, timed one by one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client as Line
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torrential.bench.job import bench_job
from torrential.config import LocalSettings
from torrential.run import Silent
from torrential.server.client import Client
from torrential.server.consistency import Consistency
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.strategies.roles import Role, Roles, Servers
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.supervisor import LocalWorld

Operations = dict[str, Callable[[], Any]]
SMALL = 256  # elements of the small push and pull: 1 KB
SPARSE = 100  # one key in so many


@dataclass(frozen=True)
class Setup:
    kind: str
    numel: int
    driver: str  # where it listens
    key: str  # what to show it, in hexadecimal
    workers: int = 1
    servers: int = 1
    transport: str = "shared"
    threads: int = 1

    @property
    def name(self) -> str:
        if self.kind != "ours":
            return self.kind
        many = f" {self.workers}w{self.servers}s" if self.workers * self.servers > 1 else ""
        return f"ours {self.transport}{many}"


def start(setup: Setup) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.stores", json.dumps(asdict(setup))]
    return subprocess.Popen(command, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"})


def obey(setup: Setup, operations: Operations) -> None:
    """Until the driver hangs up."""
    with Line(setup.driver, authkey=bytes.fromhex(setup.key)) as line:
        line.send((setup.name, os.getpid()))
        while True:
            try:
                name, times = line.recv()
            except EOFError:
                return
            if name not in operations:
                line.send(None)
                continue
            operation, seconds = operations[name], []
            for _ in range(times):
                began = time.perf_counter()
                operation()
                seconds.append(time.perf_counter() - began)
            line.send(seconds)


def sparse_keys(numel: int) -> Tensor:
    return torch.randperm(numel, generator=torch.Generator().manual_seed(0))[: numel // SPARSE].sort().values


class Store:
    """A vector and what can be done to it, in one process."""

    def __init__(self, numel: int) -> None:
        self.values = torch.zeros(numel)
        self.weights = nn.Parameter(torch.zeros(numel))
        self.optimizer = torch.optim.Adagrad([self.weights], lr=0.01, fused=True)
        self.numel = numel

    def add(self, gradient: Tensor) -> None:
        self.values.add_(gradient)

    def get(self) -> Tensor:
        return self.values

    def step(self, gradient: Tensor) -> None:
        self.weights.grad = gradient
        self.optimizer.step()

    def add_keys(self, keys: Tensor, gradient: Tensor) -> None:
        self.values.index_add_(0, keys, gradient)

    def add_and_get(self, gradient: Tensor) -> Tensor:
        part = self.values[: gradient.numel()]
        part.add_(gradient)
        return part.clone()  # of a view Ray would send all that it is a view of


def plain(setup: Setup) -> None:
    """The operation itself, with nobody else involved."""
    store, gradient, into = Store(setup.numel), torch.full((setup.numel,), 1e-3), torch.zeros(setup.numel)
    keys = sparse_keys(setup.numel)
    small = gradient[keys].clone()
    obey(
        setup,
        {
            "push": lambda: store.add(gradient),
            "pull": lambda: into.copy_(store.values),
            "adagrad": lambda: store.step(gradient),
            "sparse": lambda: store.add_keys(keys, small),
        },
    )


# -- torch RPC --------------------------------------------------------------------------------------------------------
_store: Store | None = None  # of this process, when it is the server


def _remote(name: str, *args: Tensor) -> Tensor | None:
    assert _store is not None
    result: Tensor | None = getattr(_store, name)(*args)
    return result


def rpc(setup: Setup) -> None:
    there = json.dumps(asdict(setup) | {"kind": "rpc-server"})
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        server = subprocess.Popen([sys.executable, "-m", "benchmarks.stores", there, directory])
        _rpc_worker(setup, directory)
        server.wait()


def _join_rpc(name: str, rank: int, directory: str) -> Any:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/store", rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def _rpc_worker(setup: Setup, directory: str) -> None:
    rpc = _join_rpc("worker", 0, directory)
    gradient = torch.full((setup.numel,), 1e-3)
    keys = sparse_keys(setup.numel)
    few, small = gradient[keys].clone(), gradient[:SMALL].clone()
    into = torch.zeros(setup.numel)
    obey(
        setup,
        {
            "push": lambda: rpc.rpc_sync("server", _remote, ("add", gradient)),
            "pull": lambda: into.copy_(rpc.rpc_sync("server", _remote, ("get",))),
            "pull, fresh": lambda: rpc.rpc_sync("server", _remote, ("get",)),
            "adagrad": lambda: rpc.rpc_sync("server", _remote, ("step", gradient)),
            "sparse": lambda: rpc.rpc_sync("server", _remote, ("add_keys", keys, few)),
            "small": lambda: rpc.rpc_sync("server", _remote, ("add_and_get", small)),
        },
    )
    rpc.shutdown()


def rpc_server(setup: Setup, directory: str) -> None:
    global _store
    _store = Store(setup.numel)
    _join_rpc("server", 1, directory).shutdown()


# -- Ray --------------------------------------------------------------------------------------------------------------
def ray(setup: Setup) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor: Any = ray.remote(Store).remote(setup.numel)
    gradient = torch.full((setup.numel,), 1e-3)
    keys = sparse_keys(setup.numel)
    few, small = gradient[keys].clone(), gradient[:SMALL].clone()
    into = torch.zeros(setup.numel)
    obey(
        setup,
        {
            "push": lambda: ray.get(actor.add.remote(gradient)),
            "pull": lambda: into.copy_(ray.get(actor.get.remote())),
            "adagrad": lambda: ray.get(actor.step.remote(gradient)),
            "sparse": lambda: ray.get(actor.add_keys.remote(keys, few)),
            "small": lambda: ray.get(actor.add_and_get.remote(small)),
        },
    )
    ray.shutdown()


# -- a plain tcp socket -----------------------------------------------------------------------------------------------
def plain_socket(setup: Setup) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    size = 4 * setup.numel
    if os.fork() == 0:
        far, _ = listener.accept()
        _sink(far, memoryview(bytearray(size)))
        os._exit(0)
    near = socket.create_connection(listener.getsockname())
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, into = memoryview(bytes(size)), memoryview(bytearray(size))

    def push() -> None:
        near.sendall(b"w")
        near.sendall(data)
        near.recv(1)

    def pull() -> None:
        near.sendall(b"r")
        _fill(near, into)

    def small() -> None:
        near.sendall(b"s" + data[: 4 * SMALL])
        _fill(near, into[: 4 * SMALL])

    obey(setup, {"push": push, "pull": pull, "small": small})
    near.close()
    os.wait()


def _sink(far: socket.socket, memory: memoryview) -> None:
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while word := far.recv(1):
        if word == b"w":
            _fill(far, memory)
            far.sendall(b"d")
        elif word == b"r":
            far.sendall(memory)
        else:
            _fill(far, memory[: 4 * SMALL])
            far.sendall(memory[: 4 * SMALL])


def _fill(sock: socket.socket, memory: memoryview) -> None:
    while memory.nbytes:
        memory = memory[sock.recv_into(memory, 0, socket.MSG_WAITALL) :]


# -- torrential -------------------------------------------------------------------------------------------------------
class Bench(Strategy, frozen=True, kw_only=True):
    """A worker that does what the driver asks."""

    name: ClassVar[str] = "bench-server"
    summary: ClassVar[str] = "times the parameter server"

    setup: Setup

    def roles(self, workers: int, servers: int) -> Roles:
        return Role("worker", workers, self.worker, "view"), Servers(servers, Consistency(None))

    def worker(self, ctx: Context) -> None:
        numel = self.setup.numel
        client = Client(ctx.comm, numel, torch.float32)
        clock = client.enter()
        gradient, into = ctx.replica.gradient(), ctx.replica.vector()  # registered
        gradient.fill_(1e-3)
        keys = ctx.comm.buffer("keys", numel // SPARSE, torch.int64).copy_(sparse_keys(numel))
        few = ctx.comm.buffer("few", numel // SPARSE, torch.float32).copy_(gradient[keys])
        small = [(0, gradient[:SMALL])]
        obey(
            self.setup,
            {
                "push": lambda: client.add(gradient).wait(),
                "pull": lambda: client.get(into).wait(),
                "adagrad": lambda: client.push(gradient, clock=clock, lr=1e-3).wait(),
                "sparse": lambda: client.add(few, keys=keys).wait(),
                "small": lambda: client.push_pull(small, into[:SMALL], clock=clock, lr=1e-3).wait(),
            },
        )
        ctx.comm.leave()


def ours(setup: Setup) -> None:
    settings = LocalSettings(transport=setup.transport, threads=setup.threads)  # type: ignore[arg-type]
    job = bench_job(Bench(setup=setup), settings, setup.workers, setup.servers, setup.numel)
    launch = Launch()
    try:
        LocalWorld(launch).run(job, lambda _: None, Silent())
    finally:
        launch.close()


KINDS = {"plain": plain, "socket": plain_socket, "rpc": rpc, "ray": ray, "ours": ours}


def main() -> None:
    setup = Setup(**json.loads(sys.argv[1]))
    torch.set_num_threads(setup.threads)
    if setup.kind == "rpc-server":
        rpc_server(setup, sys.argv[2])
    else:
        KINDS[setup.kind](setup)


if __name__ == "__main__":
    from benchmarks import stores  # so that what travels to other processes is not of __main__

    stores.main()
