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
    recompute: Literal["none", "sqrt", "recursive", "auto", "stage"] = "none"
    """The activations that are computed again in backward instead of being kept: all but the inputs of about √n
    segments of n layers (sqrt); halves of halves, which keeps least and takes longest (recursive); as few as `memory`
    allows (auto). Pipelines: all but the inputs of stages (stage)."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """The numbers that forward and loss are computed in, where autocast takes that for safe; parameters, gradients and
    optimizer state are float32. The loss of fp16 is scaled."""
    memory: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The gigabytes that a worker's parameters, gradients, optimizer state and activations may take, for
    recompute=auto."""
    compile: bool = False
    """Whether forward and backward are compiled by torch.compile, before the run begins; the first worker compiles, and
    the others read what it has."""
    channels_last: bool = False
    """Whether batches of images are laid out with the channels of a pixel side by side, as kernels for convolutions
    like it best."""
    trace: bool = False
    """Whether to write trace.json, in which Perfetto shows what every worker did when; of a simulation, every other
    role and NIC, too."""


class LocalSettings(Settings, frozen=True, kw_only=True, tag_field="world", tag="local"):
    """Options of runs on this machine's processes (--world local)."""

    transport: Literal["shared", "unix", "tcp"] = "shared"
    """The way data travels between workers on this host: shared memory, Unix sockets or TCP."""
    security: Literal["token", "tls"] = "token"
    """What protects TCP connections between the processes of a run: token (both ends prove that they know the run's
    secret; what follows is in clear) or tls (the same inside TLS 1.3, with certificates on both ends)."""
    certificate: str | None = None
    """The file of the certificate that all processes of the run show, for security=tls (PEM); by default each has one
    that the run makes."""
    key: str | None = None
    """The file of that certificate's key (PEM, without a password)."""
    authority: str | None = None
    """The file of the certificates that must have signed what others show (PEM)."""
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


class HostsSettings(LocalSettings, frozen=True, kw_only=True, tag="hosts"):
    """Options of runs on several hosts (--rendezvous)."""

    transport: Literal["tcp"] = "tcp"
    """The way data travels between workers: TCP."""
    algorithm: Literal["auto", "hierarchical", "naive", "direct", "ring", "halving", "blocks", "tree"] = "auto"
    """The all-reduce that sums gradients: by messages (direct, ring, ...), or in the memory of each host and by
    messages between them (hierarchical); auto is the one that is measured to be the quickest."""
    hosts: AtLeastOne = 1
    """The number of hosts."""
    host_timeout: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """Seconds of silence after which a host is lost. Its own roles end by then, too."""
    placement: str = ""
    """Roles that are to be on other hosts than by rule: "observer:2,server-1:0". By rule, workers are in blocks of
    ranks, servers on the hosts in turn, coordinators and the observer on host 0."""


class RaySettings(HostsSettings, frozen=True, kw_only=True, tag="ray"):
    """Options of runs on a Ray cluster (--world ray)."""

    hosts: AtLeastOne | None = None  # type: ignore[assignment]  # a run that has begun has a number
    """The number of hosts; by default the fewest that have the CPUs and GPUs."""
    cpus_per_worker: AtLeastOne = 1
    """The CPUs that Ray reserves for each worker, which are also its threads unless `threads` says otherwise."""
    gpus_per_worker: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """The GPUs that Ray reserves for each worker; with 0.5 two workers of a host share one. 0: train on CPUs."""
    interface: str | None = None
    """The network that hosts talk over, as a network interface of the driver's host (eth1) or its address there; by
    default the one that Ray uses."""


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


WORLDS: dict[str, type[LocalSettings] | type[SimSettings]] = {
    "local": LocalSettings,
    "hosts": HostsSettings,
    "ray": RaySettings,
    "sim": SimSettings,
}


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


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """Options of how gradients travel; by default as they are."""

    compress: Literal["none", "topk", "dgc", "powersgd", "int8"] = "none"
    """The compressor of gradients: topk and dgc (Deep Gradient Compression) send the largest elements of every matrix,
    powersgd two factors of it, int8 all elements in a byte each. What is not sent is added to the next gradient."""
    wire: Literal["float32", "bf16", "fp16"] = "float32"
    """The precision in which gradients are sent; float32 sends them as they are. Of a compressor that is the precision
    of the values that it sends; int8 has its own."""
    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.001
    """The share of the elements of a matrix that topk and dgc send."""
    rank: AtLeastOne = 4
    """The number of columns of the factors that powersgd sends."""
    momentum_correction: bool = True
    """Whether dgc gives every worker SGD's momentum for itself, before it chooses what to send."""
    momentum_masking: bool = True
    """Whether dgc takes the momentum of an element back to zero when the element is sent."""
    local_clipping: bool = True
    """Whether dgc applies the task's clip_norm to each worker's gradient, divided by the root of the number of workers,
    before it adds up what was not sent; else the sum is clipped."""
    sparsity_warmup: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Epochs in which dgc sends 1/4, then 1/16, 1/64 and 1/256 of the elements, as long as that is more than ratio; by
    default 4, but no more than a tenth of the run."""

    @property
    def changes_gradients(self) -> bool:
        """Whether gradients travel otherwise than they are."""
        return self.compress != "none" or self.wire != "float32"

    @property
    def corrects_momentum(self) -> bool:
        """Whether workers have SGD's momentum for themselves."""
        return self.compress == "dgc" and self.momentum_correction

    @property
    def clips_locally(self) -> bool:
        """Whether each worker clips what it adds, in the place of the sum."""
        return self.compress == "dgc" and self.local_clipping


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
    settings: LocalSettings | HostsSettings | RaySettings | SimSettings
    recipe: Recipe = Recipe()
    compression: Compression = Compression()
    cluster: dict[str, Any] | None = None  # what is simulated, as in a cluster file
    schedule: dict[str, Any] | None = None  # the task's own: rates or factors in the course of the run
    base_batch: Count = 0  # the joined batch that lr is meant for; 0: unknown, nothing is scaled
    script: tuple[str, ...] | None = None  # the file that was launched, and its arguments, where the loop is its own
    minimize: bool = False  # whether a smaller value of the metric is better
    metric: str = ""  # its name; runs of earlier versions have it in their last record only
    segments: tuple[
        tuple[int, int], ...
    ] = ()  # that recompute=auto has chosen: the first layer, and one after the last
    changed: dict[str, Any] | None = None  # options of a shipped strategy that are not at their defaults; None: unknown

    def __post_init__(self) -> None:
        if not isinstance(self.settings, WORLDS.get(self.world, ())):
            raise ValueError(f"the settings are not those of the world {self.world!r}")

    @property
    def local(self) -> LocalSettings:
        """The settings of a run of real processes."""
        assert isinstance(self.settings, LocalSettings)
        return self.settings

    @property
    def several(self) -> HostsSettings:
        """The settings of a run on several hosts."""
        assert isinstance(self.settings, HostsSettings)
        return self.settings

    @property
    def sim(self) -> SimSettings:
        """The settings of a simulation."""
        assert isinstance(self.settings, SimSettings)
        return self.settings


def read_config(table: dict[str, Any]) -> RunConfig:
    """The configuration in a manifest; also of runs that were made before settings belonged to one world, or had
    `recompute`."""
    settings, world = table.get("settings"), table.get("world")
    if isinstance(settings, dict) and "world" not in settings and isinstance(world, str) and world in WORLDS:
        known = {name: value for name, value in settings.items() if name in WORLDS[world].__struct_fields__}
        sizes = [size for name in ("workers", "batch_size") if isinstance(size := table.get(name), int)]
        table = {"samples_per_step": math.prod(sizes)} | table | {"settings": {"world": world, **known}}
    options = table.get("options")
    if isinstance(options, dict) and "recompute" in options:  # once an option of pipelines
        given = {"recompute": "stage"} if options["recompute"] else {}
        kept = {name: value for name, value in options.items() if name != "recompute"}
        table = table | {"options": kept, "settings": table.get("settings", {}) | given}
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
    if option in Compression.__struct_fields__:
        return "compression"
    worlds = [world for world, kind in WORLDS.items() if option in kind.__struct_fields__]
    if not worlds:
        return None
    *others, last = worlds
    return f"the worlds {', '.join(others)} and {last}" if others else f"the world {last}"


def without_effect(with_servers: bool) -> set[str]:
    """Options that a strategy refuses, or that change nothing of it: with servers, workers sum nothing among themselves
    (scaling=loss is refused there, too)."""
    return {"algorithm", "hosts", "grow", "resize"} if with_servers else {"replicas", "restart_servers"}
