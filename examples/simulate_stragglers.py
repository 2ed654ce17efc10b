"""Find out what stragglers cost on a cluster of 16 machines, without having one.

The gradients and accuracies are real, the seconds are those of the cluster described below: each machine takes ten
times as long as usual for about one step in 20. So in most steps of 16 workers somebody is slow, and `allreduce` waits
for them. `backup` makes a step of the first 14 gradients of 16, and gets there in half of the time.
"""

import torrential as tt

cluster = {
    "name": "sixteen",
    "hosts": 16,
    "compute": {"seconds_per_sample": 0.002, "spread": "lognormal", "shape": 0.1},
    "network": {"latency": 100e-6, "bandwidth": 1.25e9},  # 10 Gb/s
    "stragglers": [{"factor": 10.0, "every": 20}],
}

print("strategy    seconds to 95 %  samples/s  (both in the cluster's time)")
for strategy, options in [("allreduce", {}), ("backup", {"backups": 2})]:
    run = tt.train(
        "digits-mlp",
        strategy,
        workers=16,
        batch_size=8,
        epochs=40,
        target=0.95,
        world="sim",
        cluster=cluster,
        progress=False,
        **options,
    ).summary
    print(f"{strategy:10}  {run.time_to_target or float('nan'):15.2f}  {run.samples / run.seconds:9,.0f}")
