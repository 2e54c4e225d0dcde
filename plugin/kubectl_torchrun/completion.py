"""Shell completion: kubectl runs kubectl_complete-torchrun with the words of the command line.

The output has a line for each completion, `value<TAB>description`, and a last line with a colon and
cobra's directive. https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins
"""

import sys

from click.shell_completion import ShellComplete

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.text import escape

_NO_FILES = 4
_FILES = 0


def main() -> None:
    """Entry point of kubectl_complete-torchrun."""
    *words, incomplete = sys.argv[1:] or [""]
    completer = ShellComplete(cli, {}, "kubectl torchrun", "")
    directive = _NO_FILES
    for item in completer.get_completions(words, incomplete):
        if item.type in ("file", "dir"):
            directive = _FILES
            continue
        description = " ".join((item.help or "").split())
        print(escape(f"{item.value}\t{description}" if description else item.value))
    print(f":{directive}")
