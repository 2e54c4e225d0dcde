"""`python3 <this folder>` in a pod, `python3 -m torchrun_runtime.launch` elsewhere."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if __package__:
    from .app import main
else:
    # Run as a folder: import it as a package of its own name, so that what lies beside it
    # shadows nothing.
    folder = Path(__file__).resolve().parent
    del sys.path[0]
    spec = spec_from_file_location("torchrun_launch", folder / "__init__.py")
    assert spec
    sys.modules["torchrun_launch"] = module_from_spec(spec)
    main = import_module("torchrun_launch.app").main

if __name__ == "__main__":
    sys.exit(main())
