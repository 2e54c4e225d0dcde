"""One module for each command: its flags, its help and what it does.

The module of a command is loaded when the command is used: most of them load an HTTP client.
"""

SHORT_HELP = {
    "cancel": "Delete jobs",
    "doctor": "Check the cluster and say what to mend",
    "exec": "Run a command or a shell in a node's container",
    "files": "The files that would be sent",
    "kept": "What a job's processes have kept on its claim",
    "list": "List jobs: phase, progress, what they wait for",
    "logs": "Logs of all ranks by time, of any attempt",
    "port-forward": "Forward ports, or TensorBoard, from a node",
    "queues": "List queues with running and waiting jobs",
    "resume": "Let a paused job go on",
    "run": "Send, run, follow; Ctrl-C twice deletes",
    "scale": "Give a job another number of nodes",
    "status": "One job on a screen, live",
    "submit": "Send this directory, run COMMAND in it, follow",
    "suspend": "Pause a job, keep its claims",
    "sync": "Send a directory to a job that waits or runs",
    "why": "Why a job waits or died",
}
