"""Sleep until another process changes a 32-bit word in shared memory (Linux futex)."""

from __future__ import annotations

import ctypes
import platform
import sys

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_WAIT, _WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Our flags rely on stores becoming visible in program order, which x86-64 guarantees and ARM does not."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class Futex:
    """The system call, bound once per process."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    def wait(self, address: int, value: int, seconds: float) -> None:
        """Return when woken, when the word is not `value` any more, or after `seconds`."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)

    def wake(self, address: int) -> None:
        self._syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, 2**30, None, None, 0)
