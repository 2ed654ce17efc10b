"""Data: which samples each worker takes, how they become batches, and where the files of known data sets are found."""
