"""Reads idx files, the format of MNIST and its kin, plain or gzipped.

2 zero bytes | type (1 byte) | dimensions d (1 byte) | d sizes, 4 bytes each, big-endian | the values, row by row
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torrential.errors import BadInput

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path) -> Tensor:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read {path}: {error}; fetch the file again") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise BadInput(
            f"{path} is not an idx file (it begins with {content[:4].hex(' ') or 'nothing'}); fetch it again"
        )
    dtype, dimensions = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < start:
        raise BadInput(
            f"{path} is cut off in its header ({len(content)} bytes, dimensions: {dimensions}); fetch it again"
        )
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        size = " x ".join(map(str, shape))
        raise BadInput(f"{path} has {len(content)} bytes where {size} values need {expected}; fetch it again")
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return torch.from_numpy(values.astype(dtype.newbyteorder("=")))
