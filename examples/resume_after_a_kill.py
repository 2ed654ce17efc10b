"""Kill a whole run with SIGKILL in the middle, resume it, and compare with a run that was left alone.

Nothing survives the kill but the run's directory. It holds a checkpoint of parameters, optimizer and place in the data,
from which the run goes on. You see the step at which it resumed, and that both models are equal bit for bit.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import torrential as tt

OPTIONS = {"workers": 2, "epochs": 8, "seed": 7}


def train_and_kill(out: Path) -> None:
    command = [sys.executable, "-m", "torrential", "train", "digits", "--out", str(out)]
    command += [f"--{name}={value}" for name, value in OPTIONS.items()]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as run:
        while len(list(out.glob("checkpoints/step-*/state.json"))) < 2:  # the two newest are kept
            assert run.poll() is None, f"the run ended before it was killed (exit code: {run.returncode})"
            time.sleep(0.01)
        run.kill()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        killed = Path(directory) / "killed"
        train_and_kill(killed)
        resumed = tt.train("digits", resume=killed, progress=False)
        alone = tt.train("digits", out=Path(directory) / "alone", progress=False, **OPTIONS)

    event = next(record for record in resumed.history if getattr(record, "event", None) == "resumed")
    print(f"killed, resumed at step {event.step}, ended at step {resumed.summary.steps}")
    theirs = alone.model.state_dict()
    equal = all(torch.equal(value, theirs[name]) for name, value in resumed.model.state_dict().items())
    print(f"the same as a run that was left alone, bit for bit: {equal}")
