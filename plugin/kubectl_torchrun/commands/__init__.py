"""One module for each command: its flags, its help and what it does.

A module is imported only when its command runs, because most of them import an HTTP client.
"""

SHORT_HELP = {
    "cancel": "Delete jobs",
    "checkpoint": "Ask all ranks to save and go on",
    "debug": "Debug a rank while it runs: in an editor, or with pdb",
    "doctor": "Diagnose cluster problems",
    "exec": "Run a command or a shell in a node's container",
    "files": "List the files that would be uploaded",
    "help": "Show the help of a command",
    "list": "List jobs with phase, progress and reason",
    "logs": "Print the logs of all nodes of any attempt",
    "port-forward": "Forward local ports to a node or to TensorBoard",
    "queues": "List queues with running and waiting jobs",
    "render": "Print the objects that a job would create",
    "resume": "Resume a suspended job",
    "run": "Submit and follow a job; Ctrl-C twice deletes it",
    "scale": "Change the number of nodes of a job",
    "stacks": "Print what every rank does at this moment",
    "state-files": "Print files of a job's state directory",
    "status": "Show a job and its pods, live",
    "submit": "Upload this directory and run COMMAND in it",
    "suspend": "Suspend a job and keep its PVCs",
    "sync": "Upload a directory to an existing job",
    "version": "Show the version of this plugin",
    "why": "Explain why a job is waiting or failed",
}
# Hints for words of kubectl, shells and other launchers that are no commands.
OTHER_WORDS = {
    "apply": "Use submit -f FILE.",
    "attach": "Use logs JOB --follow.",
    "create": "Use submit -f FILE.",
    "debugpy": "Use debug JOB.",
    "delete": "Use cancel JOB.",
    "describe": "Use status JOB, or why JOB.",
    "get": "Use list, or status JOB -o yaml.",
    "kill": "Use cancel JOB.",
    "launch": "Use run, or submit.",
    "ls": "Did you mean list?",
    "pdb": "Use debug JOB --pdb.",
    "ps": "Did you mean list?",
    "queue": "Did you mean queues?",
    "rm": "Use cancel JOB.",
    "shell": "Use exec JOB.",
    "ssh": "Use exec JOB.",
    "py-spy": "Use stacks JOB.",
    "start": "Use submit, or resume JOB.",
    "stop": "Use suspend JOB, or cancel JOB.",
    "tail": "Use logs JOB --follow.",
    "top": "Use status JOB, or list --watch.",
}
