"""`python3 <this folder>` in a pod, `python3 -m torchrun_runtime.launch` elsewhere."""

import os
import sys
from importlib import import_module

if __package__:
    from .app import main
else:
    # Run as a folder: import it as a package, so that its modules shadow no other's names.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(folder)
    main = import_module(f"{os.path.basename(folder)}.app").main

if __name__ == "__main__":
    sys.exit(main())
