"""Mixed precision (Micikevicius et al. 2018): forward and loss in half precision where that is safe, by torch's
autocast; parameters, gradients and optimizer state in float32. bf16 has float32's range; fp16 needs its loss scaled.

Some machines' CPUs say that they can do half precision and end the process with SIGILL when it is done. A probe in a
process of its own finds that out, once for each machine and torch, before anything is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from torrential.cache import cache_directory
from torrential.errors import BadInput
from torrential.records import replace_file

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS = 300.0  # that a probe may take; most of it is importing torch
REMEDY = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # keeps oneDNN from AMX
PROBE = """
import torch
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 8))
with torch.autocast("cpu", {dtype}):
    loss = model(torch.randn(16, 3, 8, 8)).float().square().mean()
loss.backward()
assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
"""


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A block whose forward passes are in this precision."""
    if precision not in HALVES or device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, HALVES[precision])


def check_model(model: nn.Module, precision: str) -> None:
    """Refuse a model whose own parameters are no float32: those are what mixed precision keeps exact."""
    if precision in HALVES:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                kind = str(parameter.dtype).removeprefix("torch.")
                raise BadInput(f"precision={precision} is for parameters of float32 ({name}: {kind}); leave it out")


def check_machine(precision: str, device: str) -> None:
    """Refuse a precision in which this machine cannot compute."""
    if precision not in HALVES:
        return
    if device == "cuda":
        if precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
            raise BadInput("this GPU has no bf16; use precision=fp16")
        return
    if (died := _tried(precision, {})) is None:
        return
    name, value = REMEDY
    helps = name not in os.environ and _tried(precision, {name: value}) is None
    remedy = f"set {name}={value} in the environment, which helps here" if helps else "use precision=float32"
    raise BadInput(f"precision={precision} does not work on this machine's CPU (a trial {died}); {remedy}")


def _tried(precision: str, environment: dict[str, str]) -> str | None:
    """How a process ended that has computed in this precision, in words; None: well. What was found is kept."""
    setting = environment.get(REMEDY[0], os.environ.get(REMEDY[0], ""))
    told = repr((precision, setting, torch.__version__, _processor()))
    name, directory = hashlib.blake2b(told.encode(), digest_size=8).hexdigest(), cache_directory()
    place = None if directory is None else directory / f"half-{name}"
    if place is not None and place.exists():
        return place.read_text() or None
    program = PROBE.format(dtype=str(HALVES[precision]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], env=os.environ | environment, capture_output=True, timeout=SECONDS
        )
        found = _ending(done.returncode, done.stderr.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        return f"took longer than {SECONDS:g} s"  # which says more of what else goes on here
    if place is not None:
        with contextlib.suppress(OSError):  # then it is tried again the next time
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, found.encode())
    return found or None


def _ending(code: int, said: str) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed: {said.strip().splitlines()[-1]}" if code else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
