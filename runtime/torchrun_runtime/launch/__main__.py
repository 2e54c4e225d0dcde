"""`python3 <this folder>` in a pod, `python3 -m torchrun_runtime.launch` elsewhere."""

import sys

if sys.version_info < (3, 8):  # noqa: UP036  # the image is the user's
    # In syntax that every Python 3 can parse: older ones report a SyntaxError for the other files.
    import json
    import os
    import time

    _EXIT_CODE = 78  # EX_CONFIG of sysexits.h
    _MESSAGE = (
        "The image has Python {}.{}, but the launcher needs Python 3.8 or later. Use an image"
        " with a later Python."
    ).format(*sys.version_info[:2])
    sys.stderr.write("torchrun-launch: error: " + _MESSAGE + "\n")
    _BODY = {
        "rank": None,
        "exitCode": _EXIT_CODE,
        "signal": None,
        "reason": "PythonTooOld",
        "message": _MESSAGE,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    try:
        with open(os.environ.get("TORCHRUN_TERMINATION_LOG", "/dev/termination-log"), "r+") as _log:
            json.dump(_BODY, _log)
    except OSError:
        pass  # the file is missing; the exit code and the log show the reason
    sys.exit(_EXIT_CODE)

from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

# They concern the command that another process of this program runs.
_OF_COMMAND = (["stacks"], ["debug"], ["save"])
MODULE = sys.argv[1] if sys.argv[1:2] in _OF_COMMAND else "launcher"
if __package__:
    package = __package__
else:
    # Run as a folder: import it as a package with its own name, so that its modules do not shadow
    # others.
    folder = Path(__file__).resolve().parent
    del sys.path[0]
    spec = spec_from_file_location("torchrun_launch", folder / "__init__.py")
    assert spec
    package = "torchrun_launch"
    sys.modules[package] = module_from_spec(spec)

if __name__ == "__main__":
    sys.exit(import_module(f"{package}.{MODULE}").main())
