"""Releases: `make version` and `make release`. Standard library and torchrun_cluster only."""
