"""What Ray begins on each host: a process that takes part in runs as that host. It needs no torch and no part of Ray.

It goes when Ray ends it, and by itself when the driver of a run is gone or silent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from torrential.comm import stream
from torrential.errors import RunFailed, TorrentialError
from torrential.worlds.hosts.messages import Come, versions
from torrential.worlds.hosts.program import HostProgram
from torrential.worlds.hosts.rendezvous import Rendezvous, join
from torrential.worlds.local.warm import Warm

JOIN_SECONDS = 60.0


class Agent:
    def __init__(self, number: int) -> None:
        self._number = number
        self._warm = Warm()  # torch is loaded there while the driver loads it, too

    def __repr__(self) -> str:
        """The name that Ray puts before whatever is printed here."""
        return f"host {self._number}"

    def node(self) -> str:
        """The id of the host, as Ray has it."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def follow(self, meeting: Rendezvous, pickled: Any, tensors: Any) -> str:
        """Take part in a run until it has ended; returns what went wrong, in words. The job was packed by the driver
        (shipping.py): both parts are arrays in memory that Ray shares among this host's processes."""
        fds = [_file_of("torrential-pickle", pickled), _file_of("torrential-tensors", tensors)]
        try:
            sock = join(meeting, Come(meeting.host, socket.gethostname(), versions()), JOIN_SECONDS)
            launch = self._warm.launch()
            program = HostProgram(sock, meeting.secret, launch, packed=(os.getpid(), fds[0], fds[1]))
            try:
                program.serve()
            finally:
                program.close()
        except RunFailed as error:
            if isinstance(error.__cause__, stream.Closed):
                self._warm.close()
                os._exit(1)  # nobody is there to say it to
            return str(error)
        except TorrentialError as error:
            return str(error)
        finally:
            for fd in fds:
                os.close(fd)
        return ""


def _file_of(name: str, parts: Sequence[int]) -> int:
    fd, data = os.memfd_create(name), memoryview(parts)  # type: ignore[arg-type]
    while data.nbytes:
        data = data[os.write(fd, data) :]
    return fd
