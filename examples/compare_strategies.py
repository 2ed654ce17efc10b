"""Ask which of two strategies reaches 90 % accuracy sooner when one of two workers is four times as slow.

Each strategy is trained four times, with another seed each time, and they take turns. You see a line for each run, then
all times and the verdict: how many times sooner one was, with a confidence interval, or that no difference was seen.
"""

import json
import subprocess
import sys

command = [sys.executable, "-m", "torrential", "compare", "digits", "--json"]
question = ["--strategies", "allreduce,downpour", "--workers", "2", "--target", "0.9", "--trials", "4"]
situation = ["--set", "slow=1:4", "--set", "evaluate_every=5"]

done = subprocess.run([*command, *question, *situation], stdout=subprocess.PIPE, text=True, check=True)
study = json.loads(done.stdout.splitlines()[-1])

print()
for entry in study["entries"]:
    times = ", ".join("never" if seconds is None else f"{seconds:.2f}" for seconds in entry["times"])
    reached = f"{entry['reached']} of {entry['trials']} runs reached {study['target']:.0%}"
    print(f"{entry['name']:10} {reached}, after {times} s")
print(*study["verdict"], sep="\n")
