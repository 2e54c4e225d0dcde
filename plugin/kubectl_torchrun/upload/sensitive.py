"""What is left out without an ignore file: likely secrets, caches, virtual environments."""

from pathlib import Path

from kubectl_torchrun.upload import gitignore

SECRETS = gitignore.parse(
    [
        ".env",
        ".env.*",
        "!.env.example",
        "!.env.sample",
        "!.env.template",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "*.jks",
        "*.kdbx",
        "id_rsa",
        "id_dsa",
        "id_ecdsa",
        "id_ed25519",
        ".netrc",
        ".pypirc",
        ".git-credentials",
        ".htpasswd",
        "kubeconfig",
        ".kube/",
        ".aws/",
        ".azure/",
        ".config/gcloud/",
        ".docker/",
        ".gnupg/",
        ".ssh/",
    ]
)

ALWAYS = frozenset({".git", "__pycache__"})


def is_environment(directory: Path) -> bool:
    """A Python virtual environment (PEP 405): made for this machine, useless on another."""
    return (directory / "pyvenv.cfg").is_file()


def is_cache(directory: Path) -> bool:
    """Tagged as a cache by https://bford.info/cachedir, as mypy, ruff, pytest and cargo do."""
    return (directory / "CACHEDIR.TAG").is_file()
