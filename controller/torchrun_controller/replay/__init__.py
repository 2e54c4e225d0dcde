"""Record what the controller reads of a cluster, and see again what reconcile decides from it.

    python -m torchrun_controller.replay record FILE      until Ctrl-C
    python -m torchrun_controller.replay plans FILE       the Plans, each against the one before

A recording goes through the same watcher, caches, observe and reconcile as in the controller, with
the recorded time for the clock: the same file gives the same Plans, wherever and whenever it is
replayed. What the controller knows beside the API is not in it: progress that workers report, and
refusals of its own writes.
"""
