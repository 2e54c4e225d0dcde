"""The version of the plugin."""

from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def version() -> str:
    """The version of the installed package; in a checkout, that of pyproject.toml."""
    from importlib import metadata

    try:
        return metadata.version("kubectl-torchrun")
    except metadata.PackageNotFoundError:
        import tomllib

        try:
            project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
            return f"{project['version']} (checkout)"
        except OSError:
            return "unknown"


def version_line() -> str:
    """The line that `version` and --version print."""
    return f"kubectl torchrun, version {version()}"
