"""Reads PNG images of 8-bit RGB or RGBA, not interlaced, into arrays; enough for data sets kept as PNG.

signature | chunks: length (4 bytes, big-endian), kind (4), content, checksum (4) | IDAT chunks joined: zlib of the rows

A row is one byte that names its filter, then its pixels as differences from what that filter predicts. Filters 0 to 2
are undone by numpy a row at a time; 3 and 4 depend on the byte just decoded, so they take a Python loop. Encoders
choose them where they pay, which in photographs squeezed into one line per image is hardly ever.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from torrential.errors import BadInput

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {2: 3, 6: 4}  # by colour type
_SUB, _UP, _AVERAGE, _PAETH = 1, 2, 3, 4


def read_png(content: bytes, name: str) -> NDArray[np.uint8]:
    """The image as (height, width, 3); transparency is dropped. `name` is for messages."""
    chunks = _chunks(content, name)
    head = chunks.get(b"IHDR", b"").ljust(13, b"\0")
    width, height = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:8], "big")
    depth, colour, interlaced = head[8], head[9], head[12]
    if depth != 8 or colour not in _CHANNELS or interlaced:
        raise BadInput(
            f"{name} is a PNG of another kind (bits: {depth}, colour type: {colour}, interlaced: {interlaced}); "
            "only 8-bit RGB and RGBA without interlacing are read"
        )
    channels = _CHANNELS[colour]
    try:
        rows = np.frombuffer(zlib.decompress(chunks.get(b"IDAT", b"")), np.uint8).reshape(height, 1 + width * channels)
    except (zlib.error, ValueError) as error:
        raise BadInput(f"{name} is damaged ({error}); fetch it again") from error
    pixels = np.empty((height, width, channels), np.uint8)
    above = np.zeros((width, channels), np.uint8)
    for y in range(height):
        above = pixels[y] = _unfilter(int(rows[y, 0]), rows[y, 1:].reshape(width, channels), above, name)
    return pixels[:, :, :3]


def _chunks(content: bytes, name: str) -> dict[bytes, bytes]:
    """The chunks' contents by kind; those of one kind are joined."""
    if not content.startswith(_SIGNATURE):
        raise BadInput(f"{name} is no PNG (it begins with {content[:4].hex(' ') or 'nothing'}); fetch it again")
    found: dict[bytes, list[bytes]] = {}
    at = len(_SIGNATURE)
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        found.setdefault(content[at + 4 : at + 8], []).append(content[at + 8 : at + 8 + size])
        at += size + 12
    return {kind: b"".join(parts) for kind, parts in found.items()}


def _unfilter(kind: int, row: NDArray[np.uint8], above: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    """The pixels (width, channels) of a filtered row; bytes wrap around."""
    if kind == 0:
        return row
    if kind == _SUB:
        return np.cumsum(row, axis=0, dtype=np.uint8)
    if kind == _UP:
        return row + above
    if kind not in (_AVERAGE, _PAETH):
        raise BadInput(f"{name} is damaged (a row has filter {kind}); fetch it again")
    channels = row.shape[1]
    ups, out = [*bytes(channels), *above.ravel().tolist()], list(bytes(channels))  # each begins one pixel early
    for at, value in enumerate(row.ravel().tolist()):
        left, up, corner = out[at], ups[at + channels], ups[at]
        out.append(value + ((left + up) // 2 if kind == _AVERAGE else _paeth(left, up, corner)) & 255)
    return np.array(out[channels:], np.uint8).reshape(row.shape)


def _paeth(left: int, up: int, corner: int) -> int:
    """Whichever of the three is nearest to left + up - corner; earlier ones win."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda near: abs(guess - near))
