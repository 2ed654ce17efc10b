"""Ask which of two strategies reaches 90 % accuracy sooner when one of two workers is four times as slow.

Each strategy is trained four times, with another seed each time, and they take turns. You see a line for each run, then
all times and the verdict: how many times sooner one was, with a confidence interval, or that no difference was seen.
"""

import torrential as tt

verdict = tt.compare(
    "digits",
    [tt.AllReduce(), tt.Downpour()],
    workers=2,
    target=0.9,
    trials=4,
    slow="1:4",
    evaluate_every=5,
)

print()
for entry in verdict.entries:
    times = ", ".join(f"{seconds:.2f}" for seconds in entry.times)
    print(f"{entry.name:10} {entry.reached} of {entry.trials} runs reached {verdict.target:.0%}, after {times} s")
print(verdict)
