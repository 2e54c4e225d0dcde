"""`torchrun-controller`: the entry point."""

import os
import sys
from importlib.metadata import version

from torchrun_controller import app
from torchrun_controller.settings import SettingsError, parse


def main() -> None:
    """Read the settings, then run until told to end."""
    if sys.argv[1:] == ["--version"]:
        print(f"torchrun-controller {version('torchrun-controller')}")
        return
    try:
        settings = parse(sys.argv[1:], os.environ)
    except SettingsError as error:
        sys.stderr.write(f"torchrun-controller: {error}\n")
        sys.exit(app.UNUSABLE)
    sys.exit(app.main(settings))


if __name__ == "__main__":
    main()
