"""The first process of a worker's container: copies the code, runs the command, reports its end.

`launcher` has the steps, and `round` one run of the command. Before the first round, `workspace` or
`served` copies the code, `venv` waits for the job's environment, `command` and `torchrun` decide
what runs, and `podinfo` and `fencing` wait until no rank of an older gang runs. While the command
runs, `supervise` waits for its end, `streams` has its output, and `watchdogs` and `world` watch it.
Afterwards `command_end` and `failure` find the cause. `gang` has the rounds of all nodes.

Standard library and Python 3.8 syntax only: it runs on the Python of the user's image.
"""
