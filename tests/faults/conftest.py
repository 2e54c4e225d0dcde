"""Thousands of short runs: the collector of reference cycles would take a sixth of the time."""

import gc

gc.set_threshold(100_000, 20, 20)
