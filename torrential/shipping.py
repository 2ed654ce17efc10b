"""Sends a task to child processes without loading or copying its data once more in each of them.

    parent   pack(task)    pickle, protocol 5 ──► memfd 1: (sys.path, spans, pickle bytes)
                           large buffers ───────► memfd 2: the bytes of tensors and arrays, 64-byte aligned
    child    unpack(1, 2)  maps memfd 2 copy-on-write, so that all children share its pages until one writes to them

Cloudpickle carries what is defined in `__main__` or in a user's file by value; everything else is imported by name in
the child, which therefore gets the parent's sys.path. Views of one storage are views of one storage again afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import mmap
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import msgspec
import torch

from torrential.errors import TaskFailed

_OUT_OF_BAND_BYTES = 64 * 1024
_ALIGNMENT_BYTES = 64


@dataclass
class Parcel:
    """Two descriptors to hand to children (`pass_fds=parcel.fds`); closed by `close` or at the end of a with block."""

    fds: tuple[int, int]

    def close(self) -> None:
        fds, self.fds = self.fds, (-1, -1)
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def empty_parcel() -> Parcel:
    return Parcel((os.memfd_create("torrential-pickle"), os.memfd_create("torrential-tensors")))


def pack(obj: object, least_bytes: int = _OUT_OF_BAND_BYTES) -> Parcel:
    """`least_bytes`: what is smaller is copied by every process that unpacks the parcel, not mapped."""
    parcel = empty_parcel()
    try:
        fill(parcel.fds, obj, least_bytes)
    except BaseException:
        parcel.close()
        raise
    return parcel


def fill(fds: tuple[int, int], obj: object, least_bytes: int = _OUT_OF_BAND_BYTES) -> None:
    """Pack an object into the two files of an empty parcel."""
    body, buffers = _dump(obj, least_bytes)
    pickle_fd, tensor_fd = fds
    spans: list[tuple[int, int]] = []
    end = 0
    for buffer in buffers:
        raw = buffer.raw()
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        _write(tensor_fd, raw, start)
        spans.append((start, raw.nbytes))
        end = start + raw.nbytes
    path = [os.path.abspath(entry) for entry in sys.path]  # "" is the directory we are in
    _write(pickle_fd, memoryview(pickle.dumps((path, spans, body))), 0)


@contextlib.contextmanager
def opened(process: int, pickle_fd: int, tensor_fd: int) -> Iterator[tuple[int, int]]:
    """Descriptors of the parcel that another process of this user holds."""
    fds = os.open(f"/proc/{process}/fd/{pickle_fd}", os.O_RDWR), os.open(f"/proc/{process}/fd/{tensor_fd}", os.O_RDWR)
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def unpack_from(process: int, pickle_fd: int, tensor_fd: int) -> Any:
    """The object in a parcel that another process of this user holds."""
    with opened(process, pickle_fd, tensor_fd) as fds:
        return unpack(*fds)


def unpack(pickle_fd: int, tensor_fd: int) -> Any:
    """The object that was packed. The descriptors stay open (the mapping needs them no longer)."""
    path, spans, body = pickle.loads(_mapped(pickle_fd))
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    data = _mapped(tensor_fd) if spans else memoryview(b"")
    try:
        return pickle.loads(body, buffers=[data[start : start + size] for start, size in spans])
    except Exception as error:
        raise TaskFailed(
            f"the task cannot be rebuilt in a worker: {type(error).__name__}: {error}; "
            "all modules that it needs must be importable from the task's directory or installed"
        ) from error


def _dump(obj: object, least_bytes: int) -> tuple[bytes, list[pickle.PickleBuffer]]:
    out, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(out, buffers, least_bytes)
    try:
        pickler.dump(obj)
    except Exception as error:
        part = _unsendable_field(obj)
        kind = f"{pickler.last.__module__}.{pickler.last.__qualname__}"
        raise TaskFailed(
            f"{part} cannot be sent to the workers: {type(error).__name__}: {error} (at an object of type {kind}); "
            "files, locks, connections and generators do not travel: create them inside the function that uses them"
        ) from error
    return out.getvalue(), buffers


def _unsendable_field(obj: object) -> str:
    """Which of a dataclass's fields is at fault, for the message."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            try:
                _Pickler(io.BytesIO(), [], _OUT_OF_BAND_BYTES).dump(getattr(obj, field.name))
            except Exception:
                return f"the task's {field.name!r}"
    return f"this {type(obj).__name__}"


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle with the storages of CPU tensors as protocol 5 buffers; numpy's arrays are that already."""

    def __init__(self, out: io.BytesIO, buffers: list[pickle.PickleBuffer], least_bytes: int) -> None:
        def take(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < least_bytes:
                return True  # stays in the pickle
            buffers.append(buffer)
            return False

        super().__init__(out, protocol=5, buffer_callback=take)
        self.last: type = object
        self._storages: dict[tuple[int, int], _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        self.last = type(obj)
        if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            untyped = obj._untyped_storage
            # One _Storage per memory, kept here, so that pickle's memo recognises views of the same.
            storage = self._storages.setdefault((untyped.data_ptr(), untyped.nbytes()), _Storage(untyped))
            return _typed, (storage, obj.dtype)
        if isinstance(obj, msgspec.Meta):  # in the type of a field, which has no way of its own to travel
            return _meta, (dict(obj.__rich_repr__()),)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, type(msgspec.Struct)):
            return _struct, _fields_of(obj), _members_of(obj), None, None, _set_members
        return reduced


# -- struct classes that go by value, such as a strategy of a user's own ----------------------------------------------
# Cloudpickle makes a class without fields first and adds its members to it, but a struct's fields are fixed when it is
# made. So its fields come first here; methods, which may name the class, follow when it is known.
CONFIGURED = ("frozen", "eq", "order", "tag", "tag_field", "array_like", "omit_defaults", "forbid_unknown_fields", "gc")


def _fields_of(kind: type[msgspec.Struct]) -> tuple[Any, ...]:
    own = set(kind.__struct_fields__).difference(*(getattr(base, "__struct_fields__", ()) for base in kind.__bases__))
    fields = [
        (f.name, f.type, f.default, f.default_factory)
        for f in msgspec.structs.fields(kind)
        if f.name in own or f.name in inspect.get_annotations(kind)
    ]
    keywords = {p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY}
    config = {name: getattr(kind.__struct_config__, name) for name in CONFIGURED}
    return kind.__name__, fields, kind.__bases__, kind.__module__, config | {"kw_only": not own.isdisjoint(keywords)}


def _struct(
    name: str, fields: list[Any], bases: tuple[type, ...], module: str, config: dict[str, Any]
) -> type[msgspec.Struct]:
    make: Any = msgspec.field
    made = [(field, type_, make(default=d, default_factory=factory)) for field, type_, d, factory in fields]
    return msgspec.defstruct(name, made, bases=bases, module=module, **config)


def _meta(bounds: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(**bounds)


def _members_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The methods, properties and class variables of a class."""
    made = {"__slots__", "__annotations__", "__module__", "__weakref__", "__dict__", *kind.__struct_fields__}
    return {name: value for name, value in vars(kind).items() if name not in made and not name.startswith("__struct")}


def _set_members(kind: type[msgspec.Struct], members: dict[str, Any]) -> None:
    for name, value in members.items():
        setattr(kind, name, value)


class _Storage:
    def __init__(self, untyped: torch.UntypedStorage) -> None:
        self.untyped = untyped

    def __reduce_ex__(self, protocol: Any) -> Any:
        flat = torch.empty(0, dtype=torch.uint8).set_(self.untyped)
        return _untyped, (pickle.PickleBuffer(flat.numpy().data),)


def _untyped(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.empty(0).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _mapped(fd: int) -> memoryview:
    """The file behind `fd`, copy-on-write; the memory lives as long as something refers to it."""
    return memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
