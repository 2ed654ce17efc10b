"""Published results, done again at our size. From the root of the project: `python -m experiments.large_minibatch`."""
