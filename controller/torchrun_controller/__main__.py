"""`torchrun-controller`: the entry point."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """Read the settings and run the controller until a signal; exit with its exit code."""
    from torchrun_controller.signals import Signals

    signals = Signals().install()
    # Imports create no garbage; collections during the imports take a tenth of the start.
    gc.disable()
    from torchrun_api.contract.exit_codes import UNUSABLE

    with _without_system_cas():
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


@contextmanager
def _without_system_cas() -> Iterator[None]:
    """Let TLS contexts load no CAs of the system while aiohttp is imported.

    It builds two default contexts when it is imported, which takes a tenth of the start. No
    connection uses them: `client.credentials` builds a context with the CAs that it needs.
    """
    import ssl

    ssl.SSLContext.set_default_verify_paths = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths  # that of its base class is left


if __name__ == "__main__":
    main()
