"""Records as loggers take them: figures with names, each at a number of samples.

train/loss                              of every worker
validation/accuracy, validation/loss    at every evaluation; and test/accuracy, test/loss at the end
"""

from __future__ import annotations

import importlib.util

from torrential.errors import BadInput
from torrential.records import Evaluation, Step


def figures_of(record: Step | Evaluation, metric: str) -> dict[str, float]:
    """The figures of a record by name. `metric`: the name of the task's metric."""
    where = "train" if isinstance(record, Step) else record.split
    found = {f"{where}/{name}": value for name, value in record.figures.items()}
    if isinstance(record, Evaluation):
        found[f"{where}/{metric}"] = record.value
    return found if record.loss is None else found | {f"{where}/loss": record.loss}


def need(package: str, what: str) -> None:
    """Refuse what needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise BadInput(f"{what} needs the package {package}, which is not installed; pip install {package}")
