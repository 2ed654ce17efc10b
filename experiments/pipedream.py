"""PipeDream's claim, with the shapes of its paper's models: what pipelines gain over data parallelism, by the link.

python -m experiments.pipedream --out OUT             # a few minutes
python -m experiments.pipedream --out OUT --real      # also the bubbles of four real processes that sleep

A model is a list of layers, each with its share of the work, the bytes of its output and of its weights, counted from
the architectures of VGG-16, AlexNet and ResNet-50 for 224 x 224 images. The simulated world has a worker on each host.
Data parallelism runs with tensors that have these sizes and no contents (gradients=off). Pipelines carry tensors:
theirs are a thousandth of the size, on links that are a thousandth as fast. Links alone take time, receivers none.
Seconds per sample are about a V100's.

Written: OUT/pipedream.json, OUT/pipedream.md, OUT/pipedream.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.records import Step
from torrential.stages.plan import TwoLevelNetwork, plan_pipeline
from torrential.stages.profile import LayerProfile

SCALE = 1000  # of bytes, in runs that carry tensors
GIGABITS = (1.0, 2.5, 10.0, 25.0, 100.0)
WORKERS = (4, 8)
WINDOW = 64  # minibatches until PipeDream's pipeline is drained
BUBBLES = (1, 2, 4, 8, 16, 32)  # microbatches
CELL_SECONDS = 0.03  # forward of a microbatch on a stage that sleeps; backward takes twice as long


@dataclass(frozen=True)
class ModelShape:
    """What training needs to know of a model."""

    name: str
    batch: int  # samples of a minibatch, as in the paper
    seconds: float  # forward and backward of a sample, on one worker
    layers: list[tuple[float, int, int]]  # multiplications, elements of the output of a sample, weights

    def profile(self) -> list[LayerProfile]:
        """The layers as `torrential profile` has them."""
        total = sum(work for work, _, _ in self.layers)
        found = []
        for number, (work, output, weights) in enumerate(self.layers):
            seconds = self.batch * self.seconds * work / total
            found.append(
                LayerProfile(
                    name=str(number),
                    kind=self.name,
                    forward_seconds=seconds / 3,
                    backward_seconds=2 * seconds / 3,
                    recompute_seconds=seconds / 3,
                    activation_bytes=4 * self.batch * output,
                    parameter_bytes=4 * weights,
                )
            )
        return found


def convolution(
    size: int, inputs: int, outputs: int, kernel: int, stride: int = 1, pool: int = 1
) -> tuple[float, int, int]:
    """A convolution over `size` x `size`, with the pooling behind it."""
    made = size // stride
    weights = inputs * outputs * kernel * kernel
    return float(weights * made * made), outputs * (made // pool) ** 2, weights + outputs


def dense(inputs: int, outputs: int) -> tuple[float, int, int]:
    return float(inputs * outputs), outputs, inputs * outputs + outputs


def vgg16() -> ModelShape:
    layers, size, inputs = [], 224, 3
    for outputs, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for number in range(repeats):
            layers.append(convolution(size, inputs, outputs, 3, pool=2 if number == repeats - 1 else 1))
            inputs = outputs
        size //= 2
    return ModelShape("VGG-16", 64, 4.2e-3, [*layers, dense(512 * 49, 4096), dense(4096, 4096), dense(4096, 1000)])


def alexnet() -> ModelShape:
    convolutions = [
        (96 * 3 * 121 * 55.0 * 55, 96 * 27 * 27, 96 * 3 * 121),
        (256 * 96 * 25 * 27.0 * 27, 256 * 13 * 13, 256 * 96 * 25),
        convolution(13, 256, 384, 3),
        convolution(13, 384, 384, 3),
        (256 * 384 * 9 * 13.0 * 13, 256 * 6 * 6, 256 * 384 * 9),
    ]
    return ModelShape(
        "AlexNet", 256, 4e-4, [*convolutions, dense(256 * 36, 4096), dense(4096, 4096), dense(4096, 1000)]
    )


def resnet50() -> ModelShape:
    layers, inputs = [convolution(224, 3, 64, 7, stride=2, pool=2)], 64
    for width, repeats, size in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for number in range(repeats):
            weights = inputs * width + 9 * width * width + 4 * width * width
            weights += 4 * width * inputs if number == 0 else 0
            layers.append((float(weights * size * size), 4 * width * size * size, weights))
            inputs = 4 * width
    return ModelShape("ResNet-50", 64, 2.8e-3, [*layers, dense(2048, 1000)])


class ShapedLayer(nn.Module):
    """A layer with so many weights and so large an output, and next to no work."""

    def __init__(self, output: int, weights: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weights))
        self._output = output

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean(1, keepdim=True) + self.weight.mean()).expand(-1, self._output).contiguous()


def task_of(shape: ModelShape, batch: int, samples: int, scale: int) -> tt.Task:
    def model() -> nn.Sequential:
        sizes = ((max(1, output // scale), max(1, weights // scale)) for _, output, weights in shape.layers)
        return nn.Sequential(*(ShapedLayer(*size) for size in sizes))

    data = TensorDataset(torch.zeros(samples, 1), torch.zeros(samples))
    held_out = TensorDataset(torch.zeros(2, 1), torch.zeros(2))
    return tt.Task(
        model=model,
        loss=lambda outputs, targets: F.mse_loss(outputs.mean(1), targets),
        train=data,
        validation=held_out,
        test=held_out,
        optimizer=tt.optimizer("sgd", lr=1e-3, momentum=0.9),
        batch_size=batch,
        epochs=1,
        name=shape.name,
    )


# -- speed ------------------------------------------------------------------------------------------------------------
def network_of(workers: int, gigabits: float) -> TwoLevelNetwork:
    rate = gigabits * 1e9 / 8
    return TwoLevelNetwork(
        workers_per_host=1, hosts=workers, inside_bytes_per_second=rate, between_bytes_per_second=rate
    )


def samples_per_second(
    out: Path, shape: ModelShape, strategy: str, workers: int, gigabits: float, **options: Any
) -> float:
    scale = 1 if strategy == "allreduce" else SCALE
    steps = 2 * options.get("window", 4)
    joint = strategy != "pipedream"  # all workers' samples make one update
    batch = shape.batch * (workers if strategy == "pipeline" else 1)
    cluster = {
        "compute": {"seconds_per_sample": shape.seconds},
        "network": {"bandwidth": gigabits * 1e9 / 8 / scale, "handling": 0.0},
    }
    given = task_of(shape, batch, steps * shape.batch * (workers if joint else 1), scale)
    shutil.rmtree(out, ignore_errors=True)
    result = tt.train(
        given, strategy, workers=workers, world="sim", cluster=cluster, out=out, device="cpu", progress=False, **options
    )
    mine = [record for record in result.history if isinstance(record, Step) and record.worker == 0]
    return (mine[-1].samples - mine[0].samples) / (mine[-1].time - mine[0].time)


def speeds(out: Path) -> list[dict[str, Any]]:
    rows = []
    for shape in (vgg16(), alexnet(), resnet50()):
        for workers in WORKERS:
            for gigabits in GIGABITS:
                plan = plan_pipeline(shape.profile(), network_of(workers, gigabits), replicate=False)
                cut = {
                    "cuts": ",".join(str(stage.first) for stage in plan.stages[1:]),
                    "costs": ",".join(f"{_seconds(shape, stage.first, stage.stop):.6g}" for stage in plan.stages),
                    "copies": False,
                }
                free = plan_pipeline(shape.profile(), network_of(workers, gigabits))
                row = {
                    "model": shape.name,
                    "workers": workers,
                    "gigabits": gigabits,
                    "allreduce": samples_per_second(
                        out / "run", shape, "allreduce", workers, gigabits, gradients="off"
                    ),
                    "pipeline": samples_per_second(
                        out / "run", shape, "pipeline", workers, gigabits, microbatches=2 * workers, **cut
                    ),
                    "pipedream": samples_per_second(
                        out / "run", shape, "pipedream", workers, gigabits, window=WINDOW, **cut
                    ),
                    "predicted": shape.batch / plan.seconds,
                    "chosen": "-".join(str(stage.replicas) for stage in free.stages),
                    "chosen_predicted": shape.batch / free.seconds,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def _seconds(shape: ModelShape, first: int, stop: int) -> float:
    return sum(layer.seconds for layer in shape.profile()[first:stop])


# -- bubbles ----------------------------------------------------------------------------------------------------------
class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        node.seconds = seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(node: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * node.seconds)
        return slopes[0], slopes[0].sum(0), None


class Sleeping(nn.Module):
    """A layer that takes its time and no core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Sleep.apply(x, self.weight, self._seconds if torch.is_grad_enabled() else 0.0)
        return made


def sleeping_task(stages: int, samples: int, steps: int, seconds: float) -> tt.Task:
    data = TensorDataset(torch.zeros(steps * samples, 1), torch.zeros(steps * samples, 1))
    held_out = TensorDataset(torch.zeros(2, 1), torch.zeros(2, 1))
    return tt.Task(
        model=lambda: nn.Sequential(*(Sleeping(seconds) for _ in range(stages))),
        loss=F.mse_loss,
        train=data,
        validation=held_out,
        test=held_out,
        optimizer=tt.optimizer("sgd", lr=1e-3),
        batch_size=samples,
        epochs=1,
        name="sleeping",
    )


def bubble(out: Path, stages: int, microbatches: int, world: str, order: str = "gpipe") -> float:
    """The share of the stages' time in which they do not compute, from the end of the first step on."""
    samples, steps = 2 * microbatches, 7
    seconds = CELL_SECONDS if world == "local" else 0.0
    time_of_a_sample = 3 * CELL_SECONDS * stages / 2
    cluster = {"compute": {"seconds_per_sample": time_of_a_sample}} if world == "sim" else None
    shutil.rmtree(out, ignore_errors=True)
    result = tt.train(
        sleeping_task(stages, samples, steps, seconds),
        "pipeline",
        workers=stages,
        world=world,
        out=out,
        device="cpu",
        progress=False,
        order=order,
        microbatches=microbatches,
        costs=",".join(["1"] * stages),
        copies=False,
        cluster=cluster,
    )
    mine = [record for record in result.history if isinstance(record, Step) and record.worker == 0]
    elapsed, done = mine[-1].time - mine[0].time, mine[-1].step - mine[0].step
    return 1 - done * microbatches * 3 * CELL_SECONDS / elapsed


def bubbles(out: Path, real: bool) -> list[dict[str, Any]]:
    rows = []
    for stages in (2, 4):
        for microbatches in BUBBLES:
            row: dict[str, Any] = {"stages": stages, "microbatches": microbatches}
            row["formula"] = (stages - 1) / (microbatches + stages - 1)
            for order in ("gpipe", "zero-bubble"):
                row[f"simulated {order}"] = bubble(out / "run", stages, microbatches, "sim", order)
            if real and microbatches <= 16:
                row["real gpipe"] = bubble(out / "run", stages, microbatches, "local")
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


# -- what is written --------------------------------------------------------------------------------------------------
def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | workers | Gb/s | allreduce | pipeline | pipedream | gain | planner's guess | planner's choice |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for row in rows:
        gain = row["pipedream"] / row["allreduce"]
        lines.append(
            f"| {row['model']} | {row['workers']} | {row['gigabits']:g} | {row['allreduce']:,.0f} | "
            f"{row['pipeline']:,.0f} | {row['pipedream']:,.0f} | {gain:.2f} | {row['predicted']:,.0f} | "
            f"{row['chosen']}: {row['chosen_predicted']:,.0f} |"
        )
    return lines


def bubble_table(rows: list[dict[str, Any]]) -> list[str]:
    columns = ["formula", "simulated gpipe", "real gpipe", "simulated zero-bubble"]
    lines = ["| stages | microbatches | (K-1)/(M+K-1) | simulated | four or two processes | zero-bubble, simulated |"]
    lines.append("|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [f"{100 * row[column]:.1f} %" if column in row else "" for column in columns]
        lines.append(f"| {row['stages']} | {row['microbatches']} | " + " | ".join(cells) + " |")
    return lines


def plot(speed: list[dict[str, Any]], idle: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    colours = {"VGG-16": "tab:red", "AlexNet": "tab:orange", "ResNet-50": "tab:blue"}
    for place, workers in zip(axes, WORKERS, strict=False):
        for model, colour in colours.items():
            mine = [row for row in speed if row["model"] == model and row["workers"] == workers]
            rates = [row["gigabits"] for row in mine]
            for strategy, style in (("pipedream", "-o"), ("pipeline", "--")):
                gains = [row[strategy] / row["allreduce"] for row in mine]
                place.plot(rates, gains, style, color=colour, label=f"{model}, {strategy}", markersize=4)
        place.axhline(1, color="grey", linewidth=0.8)
        place.set(xscale="log", yscale="log", xlabel="link, Gb/s", title=f"{workers} workers, one on each host")
        place.set_xticks(GIGABITS, [f"{rate:g}" for rate in GIGABITS])
        place.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["1/4", "1/2", "1", "2", "4", "8", "16"])
        place.minorticks_off()
    axes[0].set_ylabel("times the samples/s of allreduce")
    axes[0].legend(fontsize=7)
    for stages, colour in ((2, "tab:green"), (4, "tab:purple")):
        mine = [row for row in idle if row["stages"] == stages]
        counts = [row["microbatches"] for row in mine]
        axes[2].plot(counts, [row["formula"] for row in mine], color=colour, label=f"{stages} stages, (K-1)/(M+K-1)")
        axes[2].plot(counts, [row["simulated gpipe"] for row in mine], "o", color=colour, label="simulated")
        real = [row for row in mine if "real gpipe" in row]
        marks = [row["microbatches"] for row in real], [row["real gpipe"] for row in real]
        axes[2].plot(*marks, "x", color=colour, label="processes")
    axes[2].set(xscale="log", xlabel="microbatches", ylabel="share of idle time", title="GPipe's bubble")
    axes[2].set_xticks(BUBBLES, [str(count) for count in BUBBLES])
    axes[2].minorticks_off()
    axes[2].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the directory to write to")
    parser.add_argument("--real", action="store_true", help="measure bubbles of real processes, too")
    parser.add_argument("--report", action="store_true", help="only write what OUT/pipedream.json has")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    found = args.out / "pipedream.json"
    if not args.report:
        results = {"speeds": speeds(args.out), "bubbles": bubbles(args.out, args.real)}
        found.write_text(json.dumps(results, indent=1))
    results = json.loads(found.read_text())
    lines = [*table(results["speeds"]), "", *bubble_table(results["bubbles"])]
    (args.out / "pipedream.md").write_text("\n".join(lines) + "\n")
    plot(results["speeds"], results["bubbles"], args.out / "pipedream.png")
    return 0


if __name__ == "__main__":
    from experiments import pipedream  # so that layers that travel to other processes are not of __main__

    sys.exit(pipedream.main())
