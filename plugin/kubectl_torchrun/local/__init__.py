"""A run on this machine: the controller's decisions, with processes in the place of pods."""
