"""A run's configuration: plain, frozen, complete. Everything downstream reads it and nothing writes to it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

# Bounds of what is read from files: a run is far within them, and arithmetic on floats is exact.
Workers = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


NO_LIMIT = 1 << 30
"""The epochs of a run whose script alone knows when to end."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every run."""

    threads: AtLeastOne | None = None
    """Threads per worker for arithmetic; by default the cores divided by the workers, at least one."""
    replicas: NotNegative | None = None
    """Copies of every parameter on other servers than the one that answers for it; by default 1 if there are two."""
    slow: str | None = None
    """Workers to slow down for experiments: "1:4,3:2" makes worker 1 four times as slow and worker 3 twice;
    "random:10:50" makes every worker ten times as slow in one of 50 steps, drawn by the seed."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Seconds that one role waits for another before it is taken for hung."""
    evaluate_every: AtLeastOne | None = None
    """Steps between two snapshots (evaluation and checkpoint); by default one per epoch."""
    test: bool = True
    """Whether the run ends with an evaluation on the test data. Runs that tune options leave the test data alone."""
    patience: AtLeastOne | None = None
    """Evaluations in a row without improvement after which the run stops; by default nothing stops it early."""
    min_delta: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The amount by which the validation metric must beat its best value to count as an improvement for patience."""
    keep_best: NotNegative = 0
    """Checkpoints with the best validation metric that are kept beside the two newest."""


class LocalSettings(Settings, frozen=True, kw_only=True, tag_field="world", tag="local"):
    """Options of runs on this machine's processes (--world local)."""

    transport: Literal["shared", "unix", "tcp"] = "shared"
    """The way data travels between workers on this host: shared memory, Unix sockets or TCP."""
    algorithm: Literal[
        "auto", "shared", "native", "nccl", "hierarchical", "naive", "direct", "ring", "halving", "blocks", "tree"
    ] = "auto"
    """The all-reduce that sums gradients: in shared memory, by messages (direct, ring, ...), both (hierarchical), or by
    torch.distributed (native: NCCL where each worker has its own GPU, else Gloo; nccl: that or nothing); auto is what
    fits the transport. With an algorithm that sends messages, transport=shared becomes unix."""
    hosts: AtLeastOne = 1
    """The number of hosts to pretend, each with a block of ranks; only for algorithm=hierarchical."""
    loaders: NotNegative = 0
    """Processes for each worker that read its batches ahead. What they read is the same with any number of them."""
    restart: bool = False
    """Whether a worker that died is replaced."""
    restart_servers: bool = True
    """Whether a server that died is replaced."""


class SimSettings(Settings, frozen=True, kw_only=True, tag_field="world", tag="sim"):
    """Options of simulations (--world sim)."""

    algorithm: Literal["auto", "naive", "direct", "ring", "halving", "blocks", "tree"] = "auto"
    """The all-reduce that sums gradients over simulated hosts; auto is the one that is predicted to be the quickest."""
    gradients: Literal["on", "off"] = "on"
    """Whether gradients are computed. Off: the simulation has every message and all times, but nothing is learnt."""
    processes: NotNegative = 0
    """Processes that compute gradients beside a simulation, to save time where it takes more than a few seconds; best
    one fewer than there are idle cores. The result is the same to the byte, unless a model keeps more than parameters
    and buffers from one batch to the next, or a data set changes when it is read."""
    trace: bool = False
    """Whether to write trace.json, in which Perfetto shows what every role and NIC did when."""


WORLDS: dict[str, type[LocalSettings] | type[SimSettings]] = {"local": LocalSettings, "sim": SimSettings}


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the recipe for large batches; all are off by default."""

    recipe: Literal["none", "goyal"] = "none"
    """A whole recipe at once; the options below change single pieces of it. goyal is "Accurate, Large Minibatch SGD"
    (linear scaling, 5 epochs of gradual warm-up, steps, no decay of norms and biases, last gammas zero)."""
    scaling: Literal["none", "linear", "sqrt", "loss"] = "none"
    """The way the rate grows with the batch of all workers. "loss" (allreduce only) scales the gradient instead:
    not the same thing once there is weight decay or momentum, as experiments can show with it."""
    base_batch: int | None = None
    """The joined batch (of all workers) that the task's rate is meant for; by default the task's own batch size."""
    warmup: float | None = None
    """Epochs of warm-up: none by default; with the recipe goyal 5, but no more than a tenth of the run."""
    warmup_kind: Literal["gradual", "constant"] = "gradual"
    """The shape of warm-up: gradual rises from the unscaled rate at every step; constant stays at the unscaled rate."""
    schedule: Literal["constant", "step", "cosine", "poly"] = "constant"
    """The course of the learning rate after warm-up."""
    milestones: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)
    """The fractions of the run at which a step schedule lowers the rate."""
    factor: float = 0.1
    """The factor by which a step schedule multiplies the rate at each milestone."""
    power: float = 2.0
    """The exponent of the polynomial decay (schedule=poly)."""
    grow: bool = False
    """Whether the batch grows at milestones instead of the rate falling, as long as it is at most a tenth of the data;
    at later milestones the rate falls."""
    decay_norms: bool = True
    """Whether weight decay applies to normalisation layers and biases too."""
    zero_gamma: bool = False
    """Whether the last normalisation of every residual block starts at zero. A block names it by a property last_norm;
    torchvision's are known."""
    ghost: int | None = None
    """The size of the groups in a worker's batch over which batch norm computes its statistics."""
    layerwise: Literal["none", "lars", "lamb"] = "none"
    """A layer-wise optimizer: LARS in the place of SGD, or LAMB in the place of Adam. LARS wants a rate that is 10 to
    100 times as large as that of SGD: give it with --lr."""
    trust: float = 0.001
    """LARS's trust coefficient."""
    resize: str | None = None
    """Progressive resizing of images: "0:0.5,0.6:1" is half size at first, full size from 60 % of the run. The model
    must take images of any size."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    source: str | None  # how to load it again: a built-in name or file.py[:name]
    strategy: str  # a name that is registered, /path/to/file.py:Class, or module:Class where a program made it
    options: dict[str, Any]  # the strategy's
    world: str
    workers: Workers
    servers: Count
    epochs: Count
    steps: Count | None
    target: float | None
    samples: Positive  # in the training set
    batch_size: Positive  # per worker
    samples_per_step: Positive  # of all workers that take a step together
    lr: float
    optimizer: dict[str, Any]
    seed: int
    device: str
    settings: LocalSettings | SimSettings
    recipe: Recipe = Recipe()
    cluster: dict[str, Any] | None = None  # what is simulated, as in a cluster file
    schedule: dict[str, Any] | None = None  # the task's own: rates or factors in the course of the run
    base_batch: Count = 0  # the joined batch that lr is meant for; 0: unknown, nothing is scaled
    script: tuple[str, ...] | None = None  # the file that was launched, and its arguments, where the loop is its own
    minimize: bool = False  # whether a smaller value of the metric is better
    metric: str = ""  # its name; runs of earlier versions have it in their last record only
    changed: dict[str, Any] | None = None  # options of a shipped strategy that are not at their defaults; None: unknown

    def __post_init__(self) -> None:
        if not isinstance(self.settings, WORLDS.get(self.world, ())):
            raise ValueError(f"the settings are not those of the world {self.world!r}")

    @property
    def local(self) -> LocalSettings:
        """The settings of a run on this machine's processes."""
        assert isinstance(self.settings, LocalSettings)
        return self.settings

    @property
    def sim(self) -> SimSettings:
        """The settings of a simulation."""
        assert isinstance(self.settings, SimSettings)
        return self.settings


def read_config(table: dict[str, Any]) -> RunConfig:
    """The configuration in a manifest; also of runs that were made before settings belonged to one world."""
    settings, world = table.get("settings"), table.get("world")
    if isinstance(settings, dict) and "world" not in settings and isinstance(world, str) and world in WORLDS:
        known = {name: value for name, value in settings.items() if name in WORLDS[world].__struct_fields__}
        sizes = [size for name in ("workers", "batch_size") if isinstance(size := table.get(name), int)]
        table = {"samples_per_step": math.prod(sizes)} | table | {"settings": {"world": world, **known}}
    return msgspec.convert(table, RunConfig)


def label_of(strategy: str) -> str:
    """The name by which people read of a RunConfig's strategy: ssp, mine.py:Mine, Mine."""
    file, colon, name = strategy.rpartition(":")
    return strategy.rpartition("/")[2] if not colon or file.endswith(".py") else name


# -- who owns an option -----------------------------------------------------------------------------------------------
RUN = {"task", "strategy", "workers", "servers", "epochs", "steps", "target", "batch_size", "lr", "seed", "device"}
RUN |= {"world", "cluster", "out", "resume", "progress", "listeners", "strategies", "trials", "tune", "tune_trials"}
RUN |= {"args", "minimize"}  # of a script
"""What belongs to a run or a study itself: the arguments of tt.train and tt.compare that are no options."""


def owner_of(option: str) -> str | None:
    """The owner of an option, in words, if it is not a strategy's own; None where no such option exists."""
    if option in RUN:
        return "the run"
    if option in Recipe.__struct_fields__:
        return "the recipe"
    worlds = [world for world, kind in WORLDS.items() if option in kind.__struct_fields__]
    return f"the world{'s' * (len(worlds) > 1)} {' and '.join(worlds)}" if worlds else None


def without_effect(with_servers: bool) -> set[str]:
    """Options that a strategy refuses, or that change nothing of it: with servers, workers sum nothing among themselves
    (scaling=loss is refused there, too)."""
    return {"algorithm", "hosts", "grow", "resize"} if with_servers else {"replicas", "restart_servers"}
