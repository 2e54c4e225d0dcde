"""exec and port-forward: into a run's pods."""

COMMANDS = ()
