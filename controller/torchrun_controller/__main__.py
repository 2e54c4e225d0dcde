"""`torchrun-controller`: the entry point."""

import gc
import os
import sys


def main() -> None:
    """Read the settings and run the controller until a signal; exit with its exit code."""
    from torchrun_controller.signals import Signals

    signals = Signals().install()
    # Imports create no garbage; collections during the imports take a tenth of the start.
    gc.disable()
    from torchrun_api.exit_codes import UNUSABLE
    from torchrun_controller import app
    from torchrun_controller.settings import SettingsError, parse

    gc.freeze()
    gc.enable()
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"torchrun-controller {version('torchrun-controller')}")
        return
    try:
        settings = parse(sys.argv[1:], os.environ)
    except SettingsError as error:
        sys.stderr.write(f"torchrun-controller: {error}\n")
        sys.exit(UNUSABLE)
    sys.exit(app.main(settings, signals))


if __name__ == "__main__":
    main()
