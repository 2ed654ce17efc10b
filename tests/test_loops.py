"""Ten training scripts in the style people write, each with at most five changed lines: plain, and under strategies."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torrential as tt
from torrential import checkpoint, optimizers
from torrential.randomness import seed_all
from torrential.records import Evaluation, Step

SCRIPTS = Path(__file__).parent / "loops"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
RANDOM = {"gan", "vae", "contrastive"}  # their draws depend on how batches are cut, as negatives do
EPOCHS = {"classification": 3, "vae": 3, "dicts": 3}
BATCH = 16  # of all workers together
SYNCHRONOUS = {
    "allreduce": {},
    "allreduce over sockets": {"transport": "unix"},
    "bsp": {},
    "ssp without staleness": {"staleness": 0},
}


def plain(name: str) -> str:
    """The script as it was before it was changed."""
    lines = []
    for line in (SCRIPTS / f"{name}.py").read_text().splitlines():
        code, mark, before = line.partition("  # tt")
        if not mark:
            lines.append(line)
        elif before.startswith(": "):
            lines.append(code[: len(code) - len(code.lstrip())] + before.removeprefix(": "))
    return "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_lines_of_a_script_change(name):
    assert 3 <= (SCRIPTS / f"{name}.py").read_text().count("  # tt") <= 5
    compile(plain(name), name, "exec")
    assert "tt." not in plain(name) and "run." not in plain(name)


class SeededLoader(DataLoader):
    """Draws for each batch what a run draws for it."""

    epoch = 0

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            seed_all(torch.device("cpu"), 0, 1, self.epoch, number * self.batch_size)
            yield batch
        self.epoch += 1


def trained_plainly(name: str, batch: int, monkeypatch) -> dict[str, torch.Tensor]:
    """The parameters and buffers that the plain script ends with, by the names of its models."""
    monkeypatch.setattr(sys, "argv", [name, "--batch", str(batch)])
    scope: dict[str, Any] = {"__name__": "__main__", "SeededLoader": SeededLoader}
    source = plain(name).replace("DataLoader(", "SeededLoader(")
    for kind in ("SGD", "Adam", "AdamW", "RMSprop"):  # torch's compiler is not what is tested
        monkeypatch.setattr(torch.optim, kind, optimizers._without_compiler(getattr(torch.optim, kind)))
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, name, "exec"), scope)
    if name == "gan":
        models = {"Sequential1.": scope["generator"], "Sequential2.": scope["discriminator"]}
    elif name == "contrastive":
        models = {"Sequential.": scope["encoder"], "InfoNCE.": scope["criterion"]}
    else:
        models = {"": scope["model"]}
    return {prefix + key: value for prefix, model in models.items() for key, value in model.state_dict().items()}


def launched(name, tmp_path, strategy, *, workers=2, batch=BATCH // 2, **options):
    options = {"threads": 1, "out": tmp_path / "run", "progress": False} | options
    return tt.launch(SCRIPTS / f"{name}.py", strategy, args=["--batch", str(batch)], workers=workers, **options)


SAME = [name for name in NAMES if name not in RANDOM]
PAIRS = [("allreduce", name) for name in SAME]
PAIRS += [("allreduce over sockets", name) for name in ("accumulation", "language")]
PAIRS += [(kind, name) for kind in ("bsp", "ssp without staleness") for name in ("accumulation", "finetuning")]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_two_workers_take_the_steps_of_a_plain_loop(kind, name, tmp_path, monkeypatch):
    result = launched(name, tmp_path, kind.partition(" ")[0], **SYNCHRONOUS[kind])
    expected = trained_plainly(name, BATCH, monkeypatch)
    found = result.model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_one_worker_draws_as_a_plain_loop_that_is_seeded_alike(name, tmp_path, monkeypatch):
    result = launched(name, tmp_path, "allreduce", workers=1, batch=BATCH)
    expected = trained_plainly(name, BATCH, monkeypatch)
    for key, value in result.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["ssp", "downpour"])
def test_scripts_run_with_strategies_that_do_not_wait(strategy, name, tmp_path):
    result = launched(name, tmp_path, strategy)
    steps = [record for record in result.history if isinstance(record, Step)]
    assert any(isinstance(record, Evaluation) for record in result.history)
    if name != "regression":  # which counts steps of its own
        saved, _ = checkpoint.latest(tmp_path / "run" / "checkpoints")
        used = saved.dealer.used
        assert [used.get(epoch) for epoch in range(EPOCHS.get(name, 2))] == [sum(used.values()) // len(used)] * len(
            used
        )
        assert max(step.samples for step in steps) == sum(used.values())
