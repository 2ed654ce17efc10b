"""The state of a stage on its way to whoever keeps a copy of it: parameters, the optimizer's state, buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor

from torrential.comm.protocol import Comm, Handle
from torrential.params.local import LocalParameters
from torrential.stages.parameters import StageParameters


def send_state(comm: Comm, stage: StageParameters, parameters: LocalParameters, to: int) -> list[Handle]:
    """Send a stage as it is now."""
    values, optimizer = parameters.values(), parameters.optimizer_state()
    state = {f"parameters/{name}": values[name] for name in stage.parameters}
    state |= {f"optimizer/{key}": t for key, t in optimizer.items() if key.rpartition("/")[0] in stage.parameters}
    state |= {f"buffers/{place}": buffer for place, buffer in enumerate(stage.buffers())}
    blob = torch.frombuffer(bytearray(pack({key: t.contiguous() for key, t in state.items()})), dtype=torch.uint8)
    return [comm.send(each, to, f"state {stage.stage}") for each in (torch.tensor([len(blob)]), blob)]


def receive_state(comm: Comm, stage: StageParameters, parameters: LocalParameters, source: int) -> None:
    """Take over a stage that another worker has sent."""
    tag = f"state {stage.stage}"
    size = int(comm.recv(torch.empty(1, dtype=torch.int64), source, tag).wait())
    state = unpack(comm.recv(torch.empty(size, dtype=torch.uint8), source, tag).wait().numpy().tobytes())
    parameters.load_values(parameters.values() | _under("parameters", state))
    parameters.load_optimizer_state(parameters.optimizer_state() | _under("optimizer", state))
    for place, tensor in _under("buffers", state).items():
        stage.buffers()[int(place)].copy_(tensor)


def _under(kind: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}/"): t for key, t in state.items() if key.startswith(f"{kind}/")}
