"""A run in MLflow, while it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from torrential.listeners.base import Listener, RunHandle
from torrential.listeners.figures import figures_of, need
from torrential.records import Evaluation, Record, Step, Summary, read_manifest

if TYPE_CHECKING:
    from mlflow.entities import Metric

LOG_SECONDS = 1.0  # between two calls, each of which may go over a network
AT_ONCE = 100  # parameters, or metrics, that MLflow takes in one call
LONGEST = 500  # characters of a parameter that every version of MLflow takes
TAG = "torrential.run"  # by which a run is found again


class MLflow(Listener):
    """A listener that logs to MLflow; its steps are samples. A run that is resumed goes on there, too."""

    def __init__(self, experiment: str = "torrential", tracking_uri: str | None = None) -> None:
        """`tracking_uri`: where MLflow keeps runs; by default where MLFLOW_TRACKING_URI says, or where MLflow does."""
        need("mlflow", "MLflow")
        self._experiment, self._uri = experiment, tracking_uri

    def begin(self, run: RunHandle) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        name = f"{run.directory.absolute()} {read_manifest(run.directory).created}"
        quoted = name.replace("'", "")
        found = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{quoted}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, tags={TAG: quoted}, run_name=run.directory.name).info.run_id
            self._log_config(msgspec.to_builtins(run.config))
        self._metric, self._ended_well = run.metric, False
        self._waiting: list[Metric] = []
        self._logged = time.monotonic()

    def _log_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:LONGEST]) for name, value in _flat(config)]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + AT_ONCE])

    def record(self, record: Record) -> None:
        from mlflow.entities import Metric

        if isinstance(record, Step | Evaluation):
            figures, now = figures_of(record, self._metric), int(time.time() * 1000)
            self._waiting += [Metric(name, value, now, record.samples) for name, value in figures.items()]
        if isinstance(record, Summary):
            self._ended_well = True
        if not isinstance(record, Step) or time.monotonic() - self._logged >= LOG_SECONDS:
            self._log()

    def _log(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:AT_ONCE])
            del self._waiting[:AT_ONCE]
        self._logged = time.monotonic()

    def end(self) -> None:
        self._log()
        self._client.set_terminated(self._id, "FINISHED" if self._ended_well else "FAILED")


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by names such as settings.timeout; those that are None are left out."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value
