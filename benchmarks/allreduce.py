"""Milliseconds for one all-reduce with 2 and with 4 workers: `torrential bench allreduce` for each, against Gloo.

python -m benchmarks.allreduce --workers 2,4 --sizes 100MB,10MB,1MB,4KB --rounds 7

    shared    through shared memory; the data lies in registered buffers, as gradients do
    direct    each slice straight to its owner, over unix sockets
    native    torch.distributed with Gloo, in the same processes
"""

from __future__ import annotations

import argparse
import subprocess
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="100MB,10MB,1MB,4KB")
    parser.add_argument("--rounds", default="7")
    parser.add_argument("--algorithms", default="shared,direct,native")
    given = parser.parse_args()
    for workers in given.workers.split(","):
        command = [sys.executable, "-m", "torrential", "bench", "allreduce", "--workers", workers]
        command += ["--sizes", given.sizes, "--rounds", given.rounds, "--algorithms", given.algorithms]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
