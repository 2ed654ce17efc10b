"""A run in Weights & Biases, while it goes on."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from torrential.errors import BadInput
from torrential.listeners.base import Listener, RunHandle
from torrential.listeners.figures import figures_of, need
from torrential.records import Evaluation, Record, Step, Summary, read_manifest
from torrential.usercode import in_words


class WandB(Listener):
    """A listener that logs to Weights & Biases; its curves are over samples. A run that is resumed goes on there, too.

    Without an account: WANDB_MODE=offline in the environment, or mode="offline"."""

    def __init__(self, project: str = "torrential", **options: Any) -> None:
        """`options`: further arguments of wandb.init, such as entity, tags or mode."""
        need("wandb", "Weights & Biases")
        self._project, self._options = project, options
        import wandb

        if options.get("mode", wandb.setup().settings.mode) == "online":
            try:
                wandb.login(verify=False)  # here, where it may ask for a key
            except wandb.Error as error:
                raise BadInput(
                    f"wandb: {in_words(error)}; to log without an account, set WANDB_MODE=offline"
                ) from error

    def begin(self, run: RunHandle) -> None:
        import wandb

        created = read_manifest(run.directory).created
        unique = hashlib.sha256(f"{run.directory.absolute()} {created}".encode()).hexdigest()[:16]
        options = {"name": run.directory.name, "id": unique, "resume": "allow", "dir": str(run.directory)}
        self._run = wandb.init(
            project=self._project,
            config=msgspec.to_builtins(run.config),
            **options | {"settings": wandb.Settings(console="off")} | self._options,
        )
        self._run.define_metric("*", step_metric="samples")
        self._metric, self._ended_well = run.metric, False

    def record(self, record: Record) -> None:
        if isinstance(record, Step | Evaluation):
            self._run.log({"samples": record.samples, "seconds": record.time, **figures_of(record, self._metric)})
        elif isinstance(record, Summary):
            self._ended_well = True
            self._run.summary.update({f"summary/{name}": value for name, value in msgspec.to_builtins(record).items()})

    def end(self) -> None:
        self._run.finish(exit_code=0 if self._ended_well else 1)
