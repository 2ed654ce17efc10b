"""Train with parameter servers and bounded staleness, and kill one of the two servers meanwhile.

Every parameter has a replica on the other server, which takes over at once; a new server is started and filled. You see
the loss of the server on record, that all samples were used exactly as often as planned, and how stale gradients were.
"""

import tempfile
import threading
import time
from pathlib import Path

import psutil

import torrential as tt

EPOCHS, SAMPLES = 10, 1350


def kill_a_server(records: Path) -> None:
    """Wait for the first evaluation, then send SIGKILL. Processes of a run are named after their roles."""
    while not records.exists() or '"evaluation"' not in records.read_text():
        time.sleep(0.01)
    for process in psutil.Process().children(recursive=True):
        if process.name() == "tt-server-0":
            process.kill()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        threading.Thread(target=kill_a_server, args=[out / "records.jsonl"], daemon=True).start()
        result = tt.train("digits", "ssp", workers=2, servers=2, staleness=3, epochs=EPOCHS, out=out, progress=False)

    for record in result.history:
        if getattr(record, "event", "").startswith("server_"):
            print(f"{record.time:.2f} s: {record.event}")
    summary = result.summary
    print(f"{summary.samples} samples were trained on, {EPOCHS * SAMPLES} were planned")
    print(f"gradients were {summary.staleness_mean:.1f} updates late on average, {summary.staleness_max} at most")
    print(f"test accuracy {summary.value:.1%}")
