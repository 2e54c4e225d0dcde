"""Record what the controller reads from a cluster, and replay the decisions of reconcile.

    python -m torchrun_controller.replay record FILE      until Ctrl-C
    python -m torchrun_controller.replay plans FILE       each Plan, compared with the last one

A recording passes through the watcher, the caches, observe and reconcile of the controller, with
the recorded time as the clock. So a file always gives the same Plans. It does not include progress
reports and refused writes, which the controller does not read from the API.
"""
