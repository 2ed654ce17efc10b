"""The idx reader, and the search for data files."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import pytest
import torch

from torrential.data import find as finding
from torrential.data.find import Source, find, set_data_dir
from torrential.data.idx import read_idx
from torrential.errors import BadInput

BYTES = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255])


@pytest.mark.parametrize("content", [BYTES, gzip.compress(BYTES, mtime=0)])
def test_reads_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    values = read_idx(tmp_path / "x")
    assert values.dtype == torch.uint8 and values.tolist() == [[1, 2, 3], [4, 5, 255]]


@pytest.mark.parametrize(
    ("code", "letter", "dtype"),
    [(9, "b", torch.int8), (11, "h", torch.int16), (12, "i", torch.int32), (13, "f", torch.float32)],
)
def test_reads_other_types(tmp_path: Path, code: int, letter: str, dtype: torch.dtype) -> None:
    (tmp_path / "x").write_bytes(bytes([0, 0, code, 1, 0, 0, 0, 3]) + struct.pack(f">3{letter}", -1, 2, 100))
    values = read_idx(tmp_path / "x")
    assert values.dtype == dtype and values.tolist() == [-1, 2, 100]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an idx file (it begins with nothing)"),
        (b"\x89PNG....", "not an idx file (it begins with 89 50 4e 47)"),
        (b"\0\0\x07\x01\0\0\0\0", "not an idx file"),
        (b"\0\0\x08\x00", "cut off in its header (4 bytes, dimensions: 0)"),
        (b"\0\0\x08\x03\0\0\0\x01", "cut off in its header"),
        (BYTES[:-1], "has 17 bytes where 2 x 3 values need 18"),
        (BYTES + b"!", "has 19 bytes where 2 x 3 values need 18"),
        (b"\0\0\x08\x04" + b"\xff" * 16, "values need"),
        (gzip.compress(BYTES, mtime=0)[:-9], "cannot read"),
        (b"\x1f\x8bnonsense", "cannot read"),
    ],
)
def test_refuses(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_idx(tmp_path / "x")
    assert says in str(caught.value) and str(tmp_path / "x") in str(caught.value)


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_idx(tmp_path / "none")


@pytest.fixture
def empty_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(finding, "_SYSTEM", tmp_path / "system")
    return tmp_path


def source(address: Path, *, md5: str = "") -> Source:
    files = {"a.gz": md5 or hashlib.md5(b"A").hexdigest(), "b.gz": hashlib.md5(b"B").hexdigest()}
    return Source("things", files, ("file:///nowhere/", f"{address.as_uri()}/"), "apt-get install dataset-things")


def put(place: Path, *names: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for name in names:
        (place / name).write_text(name[0].upper())
    return place


def test_search_order(empty_places: Path) -> None:
    things = source(empty_places / "none")
    system = put(empty_places / "system" / "things", "a.gz", "b.gz")
    assert find(things) == {"a.gz": system / "a.gz", "b.gz": system / "b.gz"}
    cache = put(empty_places / "cache/torrential/things", "a", "b.gz")
    assert find(things)["a.gz"] == cache / "a"
    chosen = put(empty_places / "chosen", "a.gz")  # incomplete
    assert find(things, chosen)["a.gz"] == cache / "a"
    put(chosen, "b.gz")
    assert find(things, chosen)["a.gz"] == chosen / "a.gz"
    set_data_dir(chosen)
    try:
        assert find(things)["a.gz"] == chosen / "a.gz"
    finally:
        set_data_dir(None)
    below = put(empty_places / "chosen2" / "things", "a.gz", "b.gz")
    assert find(things, below.parent)["b.gz"] == below / "b.gz"


def test_downloads_once_and_checks(empty_places: Path) -> None:
    remote = put(empty_places / "remote", "a.gz", "b.gz")
    found = find(source(remote))
    assert found["b.gz"] == empty_places / "cache/torrential/things/b.gz" and found["b.gz"].read_bytes() == b"B"
    assert sorted(p.name for p in found["b.gz"].parent.iterdir()) == ["a.gz", "b.gz"]
    assert find(source(empty_places / "gone")) == found


def test_a_wrong_checksum_leaves_nothing(empty_places: Path) -> None:
    remote = put(empty_places / "remote", "a.gz", "b.gz")
    with pytest.raises(BadInput, match="wrong checksum"):
        find(source(remote, md5="0" * 32), empty_places / "elsewhere")
    assert not list((empty_places / "elsewhere" / "things").iterdir())


def test_without_network_says_what_to_do(empty_places: Path) -> None:
    with pytest.raises(BadInput) as caught:
        find(source(empty_places / "none"))
    message = str(caught.value)
    assert "apt-get install dataset-things" in message
    assert f"put a.gz, b.gz in {empty_places}/cache/torrential/things" in message
