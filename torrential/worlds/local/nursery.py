"""A process that has torch loaded and forks a role whenever the supervisor asks.

Unlike multiprocessing's fork server it never imports the user's main module, leaves no file, and reports how each
child ended. It ends when the supervisor's end of the socket closes. The kernel ends it with its parent, and its
children with it (processes.py), so killing the supervisor in any way ends everything, also what was stopped.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import NoReturn

from torrential import processes
from torrential.comm import stream
from torrential.worlds.local.orders import Born, End, Ended, Spawn, ToNursery

_SHORT = {"coordinator": "coord"}  # the kernel keeps 15 characters of a name
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Let malloc keep what is freed instead of returning it to the system at once.

    Gradients are freed and allocated at every step; with the default settings each large one is mapped anew, zeroed
    and faulted in page by page, which for a large multi-layer perceptron doubles the time of backward.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 16 << 20)


def return_freed_memory() -> None:
    """Return freed memory to the system, once: for processes that will not need as much again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def preload() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy takes all cores in every worker
    import torch

    from torrential.worlds.local import child  # noqa: F401

    torch.set_num_threads(1)  # no pool of threads may exist when we fork
    gc.collect()
    gc.freeze()


def _become(spawn: Spawn, parent: int) -> None:
    """The child's side of the fork."""
    processes.end_with(parent)
    name = "tt-observer" if spawn.role == "observer" else f"tt-{_SHORT.get(spawn.role, spawn.role)}-{spawn.rank}"
    processes.set_name(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        from torrential.worlds.local import child

        code = child.main(spawn)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(fd: int) -> None:
    keep_freed_memory()
    preload()
    serve(fd)


def serve(fd: int) -> None:
    """Fork on demand until the supervisor is gone."""
    sock = socket.socket(fileno=fd)
    connection: stream.Plain[ToNursery | Born | Ended] = stream.Plain(sock, ToNursery, ahead=0)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ, None)
    children: dict[int, int] = {}  # pid -> pidfd
    orders: dict[int, Spawn] = {}  # pid -> what it was begun with
    me = os.getpid()
    try:
        while True:
            for key, _ in selector.select():
                if key.fileobj is sock:
                    order = connection.receive()
                    if isinstance(order, End):
                        _end(order, orders)
                        continue
                    assert isinstance(order, Spawn)
                    pid = os.fork()
                    if pid == 0:
                        sock.close()
                        selector.close()
                        for other in children.values():
                            os.close(other)
                        _become(order, me)
                    children[pid], orders[pid] = os.pidfd_open(pid), order
                    selector.register(children[pid], selectors.EVENT_READ, pid)
                    connection.send(Born(order.role, order.rank, order.life))
                else:
                    pid = key.data
                    selector.unregister(key.fileobj)
                    os.close(children.pop(pid))
                    order = orders.pop(pid)
                    _, status = os.waitpid(pid, 0)
                    code = os.waitstatus_to_exitcode(status)
                    connection.send(Ended(order.role, order.rank, order.life, code))
    except stream.Closed:
        pass  # the supervisor is gone, or done with us
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _end(order: End, orders: dict[int, Spawn]) -> None:
    for pid, spawn in orders.items():  # each is a child that nobody has waited for, so the pid is still its own
        if (spawn.role, spawn.rank, spawn.life) == (order.role, order.rank, order.life):
            os.kill(pid, signal.SIGKILL)


def serve_and_exit(fd: int, parent: int) -> NoReturn:
    """For a process that `parent` has forked to do this."""
    processes.end_with(parent)
    code = 1
    try:
        serve(fd)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
