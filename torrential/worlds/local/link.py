"""A child's side of the connections to the supervisor and to its host's agent, which grants registered buffers."""

from __future__ import annotations

import bisect
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torrential.comm import stream, wire
from torrential.comm.tls import Tls
from torrential.errors import RunFailed, WaitedTooLong
from torrential.worlds.local import messages as m
from torrential.worlds.local.orders import Asker, BufferRefused, BufferWanted, Granted, Spawn

ASK_SECONDS = 60.0
ORPHANED = 3  # the exit code of a process that has lost its supervisor: there is nothing left to do, and nobody to tell


class SupervisorLink:
    """The connection to the supervisor: it sends, and a thread sorts what comes."""

    def __init__(self, spawn: Spawn, hello: m.Hello, timeout: float) -> None:
        around, tls = spawn.around, None if spawn.identity is None else Tls(spawn.identity)
        sock = stream.dial(around.address, around.secret, hello, timeout, tls)
        if around.host_timeout:
            stream.end_when_silent(sock, around.host_timeout)
        self._connection: wire.Connection[Any] = wire.Connection(sock, m.Any)
        self.clock = around.clock
        self._sending = threading.Lock()
        self._timeout = timeout
        self.changed = threading.Condition()
        self.newest_generation = 0
        self.stop = False
        self.dismissed = False
        self._unclaimed: list[tuple[Any, list[Tensor]]] = []
        self._inbox: dict[type, Callable[[tuple[Any, list[Tensor]]], None]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        try:
            with self._sending:
                self._connection.send(message, tensors)
        except wire.Closed:
            os._exit(ORPHANED)

    def box(self, *kinds: type) -> queue.SimpleQueue[tuple[Any, list[Tensor]]]:
        """A queue for messages of these kinds, those that came before it was asked for included."""
        box: queue.SimpleQueue[tuple[Any, list[Tensor]]] = queue.SimpleQueue()
        self.route(box.put, *kinds)
        return box

    def route(self, put: Callable[[tuple[Any, list[Tensor]]], None], *kinds: type) -> None:
        """Have messages of these kinds given to `put`, by the thread that reads."""
        with self.changed:
            for kind in kinds:
                self._inbox[kind] = put
            for item in self._unclaimed:
                if isinstance(item[0], kinds):
                    put(item)
            self._unclaimed = [item for item in self._unclaimed if not isinstance(item[0], kinds)]

    def _read(self) -> None:
        try:
            while True:
                message, tensors = self._connection.receive()
                if isinstance(message, m.Probe):
                    self.send(m.Alive())
                    continue
                with self.changed:
                    self.stop |= isinstance(message, m.Stop)
                    self.dismissed |= isinstance(message, m.Dismissed)
                    if isinstance(message, m.Regroup):
                        self.newest_generation = max(self.newest_generation, message.generation)
                    elif type(message) in self._inbox:
                        self._inbox[type(message)]((message, tensors))
                    else:
                        self._unclaimed.append((message, tensors))
                    self.changed.notify_all()
        except (wire.Closed, wire.WireError):
            os._exit(ORPHANED)

    def until(self, condition: Callable[[], bool], what: str, timeout: float | None = None) -> None:
        limit = self._timeout if timeout is None else timeout
        with self.changed:
            if not self.changed.wait_for(condition, limit):
                raise WaitedTooLong("the supervisor", limit, what)


class AgentLink:
    """The connection to the agent of this host, made when it is first needed. Any thread may ask."""

    def __init__(self, spawn: Spawn) -> None:
        self._around, self._me = spawn.around, Asker(spawn.role, spawn.rank, spawn.life)
        self._connection: stream.Plain[BufferWanted | Granted | BufferRefused] | None = None
        self._asking = threading.Lock()

    def ask(self, key: str, size: int) -> Granted | BufferRefused:
        around = self._around
        with self._asking:
            try:
                if self._connection is None:
                    sock = stream.dial(around.memory, around.secret, self._me, ASK_SECONDS)
                    sock.settimeout(ASK_SECONDS)
                    self._connection = stream.Plain(sock, Granted | BufferRefused, ahead=0)
                self._connection.send(BufferWanted(key, size))
                answer = self._connection.receive()
            except (OSError, stream.Closed) as error:
                if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
                    raise WaitedTooLong("the agent of this host", ASK_SECONDS, f"buffer {key}") from error
                os._exit(ORPHANED)  # it was the supervisor's process, or the supervisor hears of it
        assert not isinstance(answer, BufferWanted)
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Buffers:
    """Registered buffers: anonymous memory files made by the host's agent, mapped by whoever asks.

    They have no name in any file system, so they vanish with the last process that has them open.
    """

    def __init__(self, agent: AgentLink, rank: int) -> None:
        self._agent, self._rank = agent, rank
        self._held: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}  # others', as bytes
        self._spans: list[tuple[int, int, str]] = []  # first byte, past the last, key; of all that is mapped, in order
        self._adding = threading.Lock()  # to `_spans`
        self._owned: list[tuple[int, int, str, Tensor]] = []  # first byte, past the last, name, tensor

    def get(self, name: str, numel: int, dtype: torch.dtype, rank: int | None) -> Tensor:
        """`rank` None: common to all."""
        key = name if rank is None else f"{name}#{rank}"
        if key not in self._held:
            tensor = self._map(key, numel, dtype)
            self._held[key] = tensor
            if rank == self._rank:
                self._owned.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name, tensor))
        return self._held[key]

    def existing(self, name: str, numel: int, dtype: torch.dtype, rank: int) -> Tensor:
        """A buffer that its owner has registered on this host: never a new one, in which there would be zeros."""
        key = f"{name}#{rank}"
        if key not in self._held and numel:
            found = self._open(key, 0).view(dtype)
            if found.numel() != numel:
                raise RunFailed(f"buffer {key!r} has {found.numel()} elements where {numel} were expected")
            self._held[key] = found
        return self._held[key] if numel else torch.empty(0, dtype=dtype)

    def _map(self, key: str, numel: int, dtype: torch.dtype) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return self._open(key, numel * dtype.itemsize).view(dtype)

    def _ask(self, key: str, size: int) -> Granted:
        answer = self._agent.ask(key, size)
        if isinstance(answer, BufferRefused):
            raise RunFailed(answer.reason)
        return answer

    def _open(self, key: str, size: int) -> Tensor:
        """`size` 0: as large as it is, if somebody has registered it."""
        answer = self._ask(key, size)
        fd = os.open(f"/proc/{answer.pid}/fd/{answer.fd}", os.O_RDWR)
        try:
            mapped = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        finally:
            os.close(fd)
        with self._adding:
            bisect.insort(self._spans, (mapped.data_ptr(), mapped.data_ptr() + mapped.nbytes, key))
        return mapped

    def file(self, key: str) -> str:
        """The path of a file that is empty at first and may grow, common to all."""
        granted = self._ask(key, -1)
        return f"/proc/{granted.pid}/fd/{granted.fd}"

    def whole(self, key: str) -> Tensor:
        whole = self._whole.get(key)
        if whole is None:
            whole = self._whole[key] = self._open(key, 0)
        return whole

    def locate(self, tensor: Tensor) -> tuple[str, int] | None:
        at = tensor.data_ptr()
        spans = self._spans
        before = bisect.bisect_right(spans, (at, sys.maxsize)) - 1
        if before < 0 or not tensor.is_contiguous():
            return None
        first, stop, key = spans[before]
        return (key, at - first) if at + tensor.nbytes <= stop and tensor.numel() else None

    def forget(self, ending: str) -> None:
        """Unmap others' buffers whose keys end so, once nobody here uses them. Called by the link's thread: another may
        be adding some meanwhile."""
        gone = {key for key in list(self._whole) if key.endswith(ending)}
        with self._adding:
            self._spans = [span for span in self._spans if span[2] not in gone]
        for key in gone:
            self._whole.pop(key, None)

    def twin(self, tensor: Tensor) -> Callable[[int], Tensor]:
        """Given a piece of one of my buffers, how to find the same piece of another rank's."""
        at = tensor.data_ptr()
        owned = next((o for o in self._owned if o[0] <= at < o[1] or at == 0), None)
        if owned is None:
            raise ValueError("tensor is not part of a registered buffer; make it with comm.buffer")
        first, _, name, whole = owned
        start = max(0, at - first) // tensor.element_size()

        def of(rank: int) -> Tensor:
            flat = self.get(name, whole.numel(), whole.dtype, rank)
            return flat[start : start + tensor.numel()].view(tensor.shape)

        return of
