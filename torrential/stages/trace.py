"""A model of any kind as a row of parts, traced by torch.distributed.pipelining.

    model    forward() calls its blocks as it likes
    graph    torch.export: every operation, with the module that it belongs to; the number of samples stays open
    split    torch.distributed.pipelining: the graph cut where the named modules begin
    parts    an nn.Sequential of TracedPart, over the model's own parameters

The tracer gives each stage that uses a parameter one of its own; here all are the model's again, found by name.
"""

from __future__ import annotations

import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, treespec_dumps

from torrential.data.batches import training_batches
from torrential.errors import BadInput
from torrential.randomness import SeparateDraws
from torrential.stages.profile import blocks
from torrential.stages.traced_part import PartCode, TracedPart
from torrential.step import pair
from torrential.task import Task, training_samples
from torrential.usercode import calling, in_words, is_users, place_of

SAMPLES = 2  # that a model is traced with; any number may follow
CHECKED = 3  # samples that traced parts are compared with the model on
BY_HAND = "cut the model by hand: Task(stages=[...]), or write it as an nn.Sequential of blocks"


class TracedModel(NamedTuple):
    """A model in parts."""

    parts: nn.Sequential
    """The parts, each a TracedPart."""
    names: list[str]
    """The modules at which all parts but the first begin."""


def trace_model(task: Task, model: nn.Module, cuts: Sequence[str] | None = None) -> TracedModel:
    """Trace a model in training mode, and cut it where the modules named in `cuts` begin: by default, before each of
    its blocks. Parameters and buffers of the parts are the model's own."""
    model.train()
    inputs = _inputs(task, SAMPLES)
    splits = _Splits(model, cuts, task.batch_size)
    with _quiet():
        from torch.distributed.pipelining import pipeline  # seconds to load, and most runs need it not

        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.dim():
                torch._dynamo.maybe_mark_dynamic(leaf, 0)
        try:
            split = pipeline(model, (inputs,), split_policy=splits).split_gm
        except BadInput:
            raise
        except Exception as error:  # of the user's forward, or of what the tracer cannot do
            raise _untraceable(model, error) from error
        parts = nn.Sequential(*_parts(model, split, splits.output_form, inputs))
    if len(parts) != len(splits.names) + 1:
        raise BadInput(f"the tracer has made {len(parts)} parts of {len(splits.names)} cuts; {BY_HAND}")
    _compare(task, model, parts)
    return TracedModel(parts, splits.names)


def _inputs(task: Task, samples: int) -> Any:
    return pair(training_batches(task).fetch(torch.arange(min(samples, training_samples(task)))))[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """The tracer logs and warns about what its exceptions say, and about itself."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _untraceable(model: nn.Module, error: Exception) -> BadInput:
    cause = error if error.__cause__ is None else error.__cause__
    place = place_of(cause)
    text = in_words(cause).partition(" For more information")[0].partition(" The following call raised")[0]
    decides = "data-dependent" in text
    remedy = "choose with torch.where in the place of an if" if decides else "write that in another way"
    return BadInput(
        f"the model ({type(model).__name__}) cannot be traced{place and f' at {place}'}: {text[:300].rstrip('. ')}; "
        f"{remedy}, or {BY_HAND}"
    )


def inner_blocks(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The blocks of a model, by name; of one that has an nn.ModuleList in it, such as a transformer's encoder, the
    blocks of that."""
    found: dict[str, nn.Module] = {}
    for name, block in blocks(model).items():
        stacked = any(isinstance(module, nn.ModuleList) for module in block.modules()) and block is not model
        found |= inner_blocks(block, f"{prefix}{name}.") if stacked else {f"{prefix}{name}": block}
    return found


# -- where to cut -----------------------------------------------------------------------------------------------------
class _Splits:
    """What the tracer asks for where to cut: marks the places in the graph, and notes what gets lost later on."""

    def __init__(self, model: nn.Module, cuts: Sequence[str] | None, batch_size: int) -> None:
        self._model, self._cuts, self._batch_size = model, cuts, batch_size
        self.names: list[str] = []
        self.output_form = ""

    def __call__(self, traced: fx.GraphModule) -> fx.GraphModule:
        self.output_form = treespec_dumps(traced.graph._codegen.pytree_info.out_spec)  # type: ignore[attr-defined]
        _check_sizes(traced, self._batch_size)
        found = self._beginnings(traced) if self._cuts is None else self._named(traced, self._cuts)
        self.names = list(found)
        for node in found.values():
            with traced.graph.inserting_before(node):
                traced.graph.call_function(torch.ops.pippy._pipe_split.default)
        traced.recompile()
        return traced

    @staticmethod
    def _operations(traced: fx.GraphModule) -> list[tuple[fx.Node, list[str]]]:
        """What the graph computes, each with the modules that it is in, from the outermost."""
        found = []
        for node in traced.graph.nodes:
            if node.op == "call_function" and node.target is not torch.ops.aten.sym_size.int:
                stack = node.meta.get("nn_module_stack") or {}
                found.append((node, [path for path, _ in stack.values()]))
        return found

    def _beginnings(self, traced: fx.GraphModule) -> dict[str, fx.Node]:
        """The blocks before which something is computed, in the order of their first calls."""
        (_, first), *rest = self._operations(traced)
        wanted, found = inner_blocks(self._model).keys() - {"", *first}, dict[str, fx.Node]()
        for node, paths in rest:
            path = next((path for path in paths if path in wanted and path not in found), None)
            if path is not None:
                found[path] = node
        return found

    def _named(self, traced: fx.GraphModule, cuts: Sequence[str]) -> dict[str, fx.Node]:
        operations, known = self._operations(traced), dict(self._model.named_modules())
        found, before, last = dict[str, fx.Node](), 0, "the beginning"
        for cut in cuts:
            if cut not in known or not cut:
                offered = ", ".join([*inner_blocks(self._model)][1:13])
                raise BadInput(f"cuts names {cut!r}, which is no module of the model; its blocks are: {offered}")
            place = next((i for i, (_, paths) in enumerate(operations) if cut in paths), None)
            if place is None:
                raise BadInput(
                    f"the model cannot be cut at {cut}: the traced forward has no operation of that module at its "
                    "outermost level (it is not called, or computes nothing); cut at another module"
                )
            if place <= before:
                nothing = "nothing is computed between" if place == before else "they are not in the order of forward:"
                raise BadInput(f"the model cannot be cut at {cut}: {nothing} {last} and {cut}; cut at a later module")
            found[cut], before, last = operations[place][0], place, cut
        return found


def _check_sizes(traced: fx.GraphModule, batch_size: int) -> None:
    """Whether what was traced holds for microbatches of any size: decisions that forward has made by size are known."""
    given = [node.meta.get("val") for node in traced.graph.nodes if node.op == "placeholder"]
    sizes: list[Any] = [value.shape[0] for value in given if isinstance(value, Tensor) and value.dim()]
    if any(isinstance(size, int) or size.node.expr.is_number for size in sizes):
        raise BadInput(
            f"the model's forward is fixed to the {SAMPLES} samples of its tracing, as where a parameter or a constant "
            f"has the batch's size; take sizes from the input (x.shape[0]), or {BY_HAND}"
        )
    for guard in sizes[0].node.shape_env.guards if sizes else ():
        for samples in range(1, batch_size + 1):
            if guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, samples)) == False:  # noqa: E712
                frame = guard.sloc.framework_loc
                place = f" at {frame.filename}:{frame.lineno}" if is_users(getattr(frame, "filename", "<")) else ""
                raise BadInput(
                    f"the model's forward decides by the number of samples ({guard.expr}{place}), "
                    f"which is another for microbatches (as for {samples}); leave that out, or {BY_HAND}"
                )


# -- parts ------------------------------------------------------------------------------------------------------------
def _parts(model: nn.Module, split: fx.GraphModule, output_form: str, inputs: Any) -> Iterator[TracedPart]:
    """The parts of a graph that torch has split into modules, with the values that live between them."""
    nodes = list(split.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    ends = next(node for node in nodes if node.op == "output").args[0]
    live = [node for node in nodes if node.op == "placeholder"]
    samples = min(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())
    takes: Any = tuple(
        tuple(None if place == 0 and size == samples else size for place, size in enumerate(leaf.shape))
        if isinstance(leaf, Tensor)
        else ()
        for leaf in tree_leaves(inputs)
    )
    numbers = set[fx.Node]()
    for place, call in enumerate(calls):
        part, is_last = _PartGraph(model, live), call is calls[-1]
        part.run(split.get_submodule(str(call.target)), call)
        before, live = live, [] if is_last else _needed(part.known, nodes, calls[place + 1 :])
        numbers_in = frozenset(i for i, value in enumerate(before) if value in numbers)
        numbers |= {value for value in live if part.is_number(value)}
        yield part.made(
            list(ends) if is_last else live,
            numbers_in=numbers_in,
            numbers_out=frozenset(i for i, value in enumerate(live) if value in numbers),
            takes=takes if place == 0 else None,
            gives=output_form if is_last else None,
        )


def _needed(known: dict[fx.Node, Any], nodes: list[fx.Node], later: list[fx.Node]) -> list[fx.Node]:
    """Those of the known values that a later part, or the output, uses."""
    users = {*later, nodes[-1]}
    return [value for value in nodes if value in known and users & value.users.keys()]


class _PartGraph:
    """One part on its way from torch's nested modules to a flat graph."""

    def __init__(self, model: nn.Module, live: list[fx.Node]) -> None:
        self._model, self._graph = model, fx.Graph()
        self.known: dict[fx.Node, Any] = {value: self._graph.placeholder(f"value_{i}") for i, value in enumerate(live)}
        self._tensors: dict[str, Tensor] = {}

    def run(self, module: nn.Module, call: fx.Node) -> None:
        """Take over what a stage of the split graph computes, and what it gives."""
        results = self._inline(module, "", [self.known[value] for value in call.args])  # type: ignore[index]
        if isinstance(results, tuple | list):
            for user in call.users:
                assert user.target is operator.getitem
                self.known[user] = results[user.args[1]]  # type: ignore[index]
        else:
            self.known[call] = results

    def _inline(self, module: Any, prefix: str, given: Sequence[Any]) -> Any:
        """Copy the nodes of a module's graph, and of the modules in it."""
        inner, arguments = dict[fx.Node, Any](), iter(given)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                inner[node] = next(arguments)
            elif node.op == "get_attr":
                inner[node] = self._tensor(module, prefix, str(node.target))
            elif node.op == "call_module":
                values = fx.node.map_arg([*node.args, *node.kwargs.values()], inner.__getitem__)
                inner[node] = self._inline(module.get_submodule(node.target), f"{prefix}{node.target}.", values)
            elif node.op == "output":
                return fx.node.map_aggregate(node.args[0], lambda arg: inner[arg] if isinstance(arg, fx.Node) else arg)
            else:
                inner[node] = self._graph.node_copy(node, inner.__getitem__)
        raise AssertionError("a graph without an output")

    def _tensor(self, module: nn.Module, prefix: str, target: str) -> fx.Node:
        """The model's own tensor of that name, or a constant that the tracer has found."""
        parts = re.sub(r"@\d+", "", f"{prefix}{target}").split(".")  # @1: of the module's second call
        found: Any = self._model
        for part in parts:
            found = getattr(found, part, None)
        if not isinstance(found, Tensor):
            found = module
            for part in target.split("."):
                found = getattr(found, part)
        if not isinstance(found, Tensor):
            raise BadInput(f"the traced model has a {type(found).__name__} in it ({target}); {BY_HAND}")
        name = next((name for name, tensor in self._tensors.items() if tensor is found), f"tensor_{len(self._tensors)}")
        self._tensors[name] = found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph has no module yet
            return self._graph.get_attr(name)

    def is_number(self, value: fx.Node) -> bool:
        made = self.known[value]
        kind = made.meta.get("val") if isinstance(made, fx.Node) else made
        return isinstance(kind, int | torch.SymInt)

    def made(self, ends: list[Any], **about: Any) -> TracedPart:
        self._graph.output(tuple(self.known.get(end, end) if isinstance(end, fx.Node) else end for end in ends))
        self._graph.lint()
        code = self._graph.python_code("self")
        changes = any(_changes_inputs(node) for node in self._graph.nodes)
        buffers = {id(buffer) for buffer in self._model.buffers()}
        return TracedPart(PartCode(code.src, code.globals, changes_inputs=changes, **about), self._tensors, buffers)


def _changes_inputs(node: fx.Node) -> bool:
    """Whether an operation works in place on something else than a buffer."""
    schema = getattr(node.target, "_schema", None)
    own = bool(node.args) and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"
    return schema is not None and bool(schema.is_mutable) and not own


# -- is it the same? --------------------------------------------------------------------------------------------------
def _compare(task: Task, model: nn.Module, parts: nn.Sequential) -> None:
    """Compare the parts, each on copies of what the one before gives, with the model: a value that is changed in place
    under two names would show here."""

    def apart(value: Any) -> Any:
        for part in parts:
            value = part(
                tuple(v.clone() for v in value) if isinstance(value, tuple) and part is not parts[0] else value
            )
        return value

    with calling("forward pass", task.model):
        whole, pieces = (_outputs(model, run, _inputs(task, CHECKED)) for run in (model, apart))
    for one, other in zip(whole, pieces, strict=True):
        if isinstance(one, Tensor) and not torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise BadInput(
                f"the model ({type(model).__name__}) computes something else when it is traced, as where a tensor is "
                f"changed in place that another one is a view of; leave out what works in place, or {BY_HAND}"
            )


def _outputs(model: nn.Module, run: Callable[[Any], Any], inputs: Any) -> list[Any]:
    """What a function of a model's gives, with the same draws every time; the model's buffers stay as they are."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with SeparateDraws(), torch.no_grad():
        found = tree_leaves(run(inputs))
    for buffer, before in buffers:
        buffer.copy_(before)
    return found
