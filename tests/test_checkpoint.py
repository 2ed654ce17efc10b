"""Checkpoints survive kills, corruption and full disks, and the same state gives the same bytes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torrential import checkpoint as checkpoints
from torrential.checkpoint import Checkpoint, latest, load, save
from torrential.errors import CheckpointDamaged, RunFailed

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "workers.safetensors"]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 7)
        self.out.weight = self.embed.weight


def make(step: int) -> Checkpoint:
    torch.manual_seed(step)
    model = Tied()
    return Checkpoint(
        step=step, epoch=1, cursor=32, samples=64 * step, seed=5, members=[0, 2], applied={"2": 9, "0": 8},
        model=model.state_dict(),
        optimizer={"out.bias/momentum_buffer": torch.randn(7), "out.bias/step": torch.tensor(3.0)},
        workers={f"{worker}/norm.running_mean": torch.randn(4) for worker in (2, 0)},
    )  # fmt: skip


def same(one: Checkpoint, other: Checkpoint) -> bool:
    plain = [(c.step, c.epoch, c.cursor, c.samples, c.seed, c.members, c.applied) for c in (one, other)]
    parts = [(getattr(one, part), getattr(other, part)) for part in checkpoints.TENSORS]
    return plain[0] == plain[1] and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a) for a, b in parts
    )


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def newest(directory: Path) -> Checkpoint:
    found, _ = latest(directory)
    assert found is not None
    return found


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", make(50))
    assert path == tmp_path / "checkpoints" / "step-00000050"
    assert names(path) == FILES
    assert same(load(path), make(50))
    assert latest(tmp_path / "checkpoints")[1] == []
    load(path).model["out.bias"].add_(1)  # writable


def test_plain_pytorch_loads_the_model_with_tied_weights(tmp_path: Path) -> None:
    path = save(tmp_path, make(3))
    model = Tied()
    model.load_state_dict(load_file(path / "model.safetensors"))
    torch.manual_seed(3)
    assert torch.equal(model.embed.weight, Tied().embed.weight)
    assert model.out.weight is model.embed.weight


def test_views_of_one_flat_buffer_and_odd_shapes(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    model = {
        "a": flat[:6].view(2, 3), "b": flat[6:], "c": flat[2:8], "t": flat.view(3, 4).t(), "none": torch.zeros(0),
        "scalar": torch.tensor(1), "half": torch.ones(3, dtype=torch.bfloat16), "flag": torch.tensor([True]),
    }  # fmt: skip
    given = replace(make(1), model=model, optimizer={}, workers={})
    assert same(load(save(tmp_path, given)), given)


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    given = make(9)
    turned = replace(
        given,
        applied=dict(reversed(given.applied.items())),
        **{part: dict(reversed(getattr(given, part).items())) for part in checkpoints.TENSORS},
    )
    one, other = save(tmp_path / "a", given), save(tmp_path / "b", turned)
    program = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r};"
        f"from test_checkpoint import make, save; save({str(tmp_path / 'c')!r}, make(9))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONHASHSEED": "77"}, timeout=60)
    for name in FILES:
        content = (one / name).read_bytes()
        assert content == (other / name).read_bytes() == (tmp_path / "c" / one.name / name).read_bytes()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 99_999_999, 100_000_000):
        save(tmp_path, make(step))
    assert names(tmp_path) == ["step-100000000", "step-99999999"]
    assert newest(tmp_path).step == 100_000_000
    save(tmp_path, make(100_000_001), keep=1)
    assert names(tmp_path) == ["step-100000001"]
    save(tmp_path, make(100_000_002), keep=1, needed=100_000_001)
    save(tmp_path, make(100_000_003), keep=1, needed=100_000_001)
    assert names(tmp_path) == ["step-100000001", "step-100000003"]


def test_a_course_given_up_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, make(50))
    (tmp_path / "step-00000100").mkdir()  # damaged, so the run resumed from 50
    save(tmp_path, make(60), keep=1)
    assert names(tmp_path) == ["step-00000060"]


def test_nothing_saved_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "none") == (None, [])


@pytest.mark.parametrize("name", FILES)
def test_any_damage_is_found_and_the_previous_used(tmp_path: Path, name: str) -> None:
    save(tmp_path, make(1))
    path = save(tmp_path, make(2)) / name
    content = path.read_bytes()
    spots = range(0, len(content), 5) if name == "state.json" else (0, 9, len(content) // 2, len(content) - 1)
    damages = [content[:spot] + bytes([content[spot] ^ 1]) + content[spot + 1 :] for spot in spots]
    for damage in [*damages, content[:-1], b""]:
        path.write_bytes(damage)
        found, skipped = latest(tmp_path)
        assert found is not None and same(found, make(1))
        assert len(skipped) == 1 and name in skipped[0] and "step-00000002" in skipped[0]
    path.unlink()
    assert newest(tmp_path).step == 1


def test_when_none_is_good_each_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, make(step))
        (tmp_path / f"step-{step:08d}" / FILES[step]).write_bytes(b"junk")
    with pytest.raises(CheckpointDamaged) as caught:
        latest(tmp_path)
    for part in ("step-00000001", "optimizer.safetensors", "step-00000002", "state.json", "without --resume"):
        assert part in str(caught.value)


def test_another_format_is_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, make(1))
    state = path / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"format": 2', b'"format": 3'))
    with pytest.raises(CheckpointDamaged, match="format 3, and this version reads 2"):
        load(path)


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, make(4))
    changed = replace(make(4), samples=1)
    save(tmp_path, changed)
    assert same(newest(tmp_path), changed)
    assert names(tmp_path) == ["step-00000004"]


def test_a_writer_killed_while_replacing_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, make(4))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "step-00000004").rename(tmp_path / f".step-00000004.old-{dead.pid}")
    (tmp_path / f".step-00000004.tmp-{dead.pid}").mkdir()
    assert same(newest(tmp_path), make(4))
    save(tmp_path, make(5))
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert same(load(tmp_path / "step-00000004"), make(4))


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    beside = tmp_path / f".step-00000009.tmp-{os.getppid()}"
    beside.mkdir()
    save(tmp_path, make(5))
    assert beside.exists()


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 64 KiB where this process may mount one; else one where writing a large tensor meets the error."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    mounted = (
        mount
        and not subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode
    )
    if not mounted:
        really = checkpoints.save_file

        def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
            really({}, path)
            if sum(tensor.numel() for tensor in tensors.values()) > 10_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            really(tensors, path)

        monkeypatch.setattr(checkpoints, "save_file", full)
    yield disk
    if mounted:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk_leaves_the_earlier_checkpoint(small_disk: Path) -> None:
    save(small_disk, make(1))
    large = replace(make(2), model={"x": torch.ones(100_000)})
    with pytest.raises(RunFailed, match=r"no room for .*step-00000002: it needs 400,0\d\d bytes and [\d,]+ are free"):
        save(small_disk, large)
    assert names(small_disk) == ["step-00000001"]
    assert same(newest(small_disk), make(1))


def test_a_failing_disk_and_an_interrupt_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, make(1))

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    for stop, error in ((fail, RunFailed), (interrupt, KeyboardInterrupt)):
        monkeypatch.setattr(checkpoints, "_sync", stop)
        with pytest.raises(error):
            save(tmp_path, make(2))
        assert names(tmp_path) == ["step-00000001"]


KILLER = """
import os, random, signal, sys, time
sys.path[:0] = {path!r}
import torch
from test_checkpoint import latest, make, names, save, same
from pathlib import Path
torch.set_num_threads(1)
directory = Path({directory!r})
start = time.monotonic()
for _ in range(5):
    save(directory, make(1))
typical = (time.monotonic() - start) / 5  # seconds a save takes on this machine, as busy as it is
rng, reached = random.Random(7), 1
for trial in range(40):
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"!")
        for step in range(reached, reached + 1000):  # the first replaces
            save(directory, make(step))
            os.write(tell, b"!")
    for _ in range(1 + trial % 4):  # saves it may finish
        os.read(ready, 1)
    time.sleep(rng.uniform(0, typical))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(tell)
    found, skipped = latest(directory)
    assert found is not None and skipped == [], (trial, skipped)
    assert found.step >= reached and same(found, make(found.step))
    reached = found.step
save(directory, make(reached + 1))
assert [name for name in names(directory) if name.startswith(".")] == []
print(reached)
"""


def test_a_writer_killed_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """One process imports torch and forks the writers that are killed: forty imports would take a minute."""
    program = KILLER.format(path=[str(Path(__file__).parent), *sys.path], directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 31  # ten of the forty have made two checkpoints at least, and ten three
