"""Thousands of random fault schedules over the shipped strategies, servers and collectives, in simulated time.

    seed ──► schedule.draw ──► SimWorld ──► audit: what must hold between any two events, and at the end

Everything about a schedule follows from its seed, so a failure is a number: `python -m torrential.testing --seed N`.
(Zhou et al. 2021, FoundationDB: test the real code against simulated misfortune, not a model of it.)
"""
