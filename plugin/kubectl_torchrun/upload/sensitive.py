"""Files that are skipped without an ignore file: likely secrets, caches, virtual environments."""

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

# .torchrun has the state and the checkpoints of runs on this machine.
ALWAYS = frozenset({".git", ".torchrun", "__pycache__"})


def is_environment(directory: Path) -> bool:
    """Whether it is a Python virtual environment (PEP 405), which works on one machine only."""
    return (directory / "pyvenv.cfg").is_file()


def is_cache(directory: Path) -> bool:
    """Whether it has a cache tag (https://bford.info/cachedir), as of mypy, pytest and cargo."""
    return (directory / "CACHEDIR.TAG").is_file()
