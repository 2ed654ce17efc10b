"""Kills workers and servers under training scripts with loops of their own, and tells what was lost.

python -m benchmarks.loop_faults --kills 30

The ten scripts of tests/loops take turns, made longer, each under allreduce, ssp and downpour in turn. In every run one
process is killed (SIGKILL) at a random moment: a worker, one whose script is started again (`restart=true`), or one of
two servers. A run has lost nothing if the command ends with 0, the script's reports are on record, every epoch used
every sample exactly once, and no process or memory is left behind.
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.campaign import campaign
from benchmarks.faults import PATIENCE_SECONDS, Run, shared_files, steps_taken, summary_of
from torrential import checkpoint
from torrential.records import Evaluation, Event, Step

SCRIPTS = sorted(Path(__file__).parents[1].joinpath("tests", "loops").glob("*.py"))
STRATEGIES = ("allreduce", "ssp", "downpour")
LONGER = 40


def lengthened(source: str) -> tuple[str, int | None]:
    """The script with more epochs, and how many; None where it counts steps."""
    found = re.search(r"^for _ in (?:run\.epochs|range)\((\d+)\)", source, re.M)
    if found is None:
        return re.sub(r"step (<|==) 20", rf"step \1 {20 * LONGER}", source), None
    epochs = int(found[1]) * LONGER
    return source[: found.start(1)] + str(epochs) + source[found.end(1) :], epochs


@functools.cache
def samples_of(script: Path) -> int:
    """Samples that an epoch of a script has, by a run that nobody disturbs; 0 where it counts steps."""
    _, epochs = lengthened(script.read_text())
    with tempfile.TemporaryDirectory(prefix="loop-faults-") as root:
        run = Run(Path(root) / "run", str(script), "--workers", "2", "--out", f"{root}/run", command="launch")
        samples = summary_of(run).samples
    return samples * LONGER // epochs if epochs else 0


def killed_once(number: int, root: Path, chance: random.Random) -> list[str]:
    """Kill one process of one run; what is wrong afterwards."""
    script = SCRIPTS[(number - 1) % len(SCRIPTS)]
    strategy = STRATEGIES[(number - 1 + (number - 1) // len(SCRIPTS)) % len(STRATEGIES)]
    restart = chance.random() < 0.5
    kind = "worker" if strategy == "allreduce" or chance.random() < 0.6 else "server"
    victim = f"tt-{kind}-{chance.randrange(2)}"
    source, epochs = lengthened(script.read_text())
    own = root / f"{number}-{script.name}"
    own.write_text(source)
    out = root / f"run-{number}"
    options = [
        "--strategy",
        strategy,
        "--workers",
        "2",
        "--set",
        "threads=1",
        "--set",
        f"restart={str(restart).lower()}",
    ]
    if strategy != "allreduce":
        options += ["--servers", "2", "--set", "replicas=1"]
    files = shared_files()
    run = Run(out, str(own), *options, "--out", str(out), command="launch")
    wanted = chance.uniform(1, 60)
    run.until(lambda records: steps_taken(records) >= wanted)
    time.sleep(chance.uniform(0, 0.1))
    pids = [pid for pid, name in run.members().items() if name == victim]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    code = run.process.wait(PATIENCE_SECONDS)
    records = run.records()
    events = [record.event for record in records if isinstance(record, Event)]
    wrong = [f"exit status {code}"] * bool(code)
    wrong += ["killed too late"] * (not pids)
    wrong += ["no report"] * (not any(isinstance(record, Evaluation) for record in records))
    if code == 0 and epochs is not None:
        samples = samples_of(script)
        used = max(record.samples for record in records if isinstance(record, Step))
        saved, _ = checkpoint.latest(out / "checkpoints")
        by_epoch = {samples} if saved is None or saved.dealer is None else set(saved.dealer.used.values())
        if used != samples * epochs or by_epoch != {samples}:
            wrong.append(f"{used:,} samples instead of {samples:,} in each of {epochs} epochs")
    wrong += run.leftovers(files)
    what = victim + (" restarted" if restart and kind == "worker" else "")
    print(
        f"{number:4} {script.stem:15} {strategy:10} {what:22} after {wanted:3.0f}  "
        f"{' '.join(sorted(set(events) - {'started', 'finished'}))[:60]:60}  {', '.join(wrong) or 'nothing lost'}",
        flush=True,
    )
    if not wrong:
        shutil.rmtree(out)
    return wrong


if __name__ == "__main__":
    campaign(__doc__, "loop-faults", "kills", "lost nothing", lambda root: killed_once)
