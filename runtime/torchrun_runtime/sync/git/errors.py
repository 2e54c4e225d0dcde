"""From git's stderr to a reason and a message with the next step."""

import re

from torchrun_runtime.sync.errors import LARGER_CLAIM, SyncError

_LONGEST = 600

# The first match counts: pattern, reason, next step, and whether only another spec can help.
_EXPLANATIONS: tuple[tuple[str, str, str, bool], ...] = (
    (
        r"No space left|Disk quota",
        "WorkspaceFull",
        f"{LARGER_CLAIM} or choose a smaller repository.",
        False,
    ),
    (
        r"update url base from redirection|error: 30\d|asked for: .* but",
        "Redirected",
        "Redirects are not followed. Set the current URL of the repository.",
        True,
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION|host key is known",
        "HostKeyMismatch",
        "The key of the host is not in known_hosts of the Secret. See: ssh-keyscan HOST",
        False,
    ),
    (
        r"error in libcrypto|invalid format|bad permissions|incorrect passphrase",
        "SecretInvalid",
        "ssh-privatekey of the Secret must be a private key without a passphrase and end with a"
        " line break.",
        False,
    ),
    (
        r"the Secret is not for|response 407|error: 407",
        "AccessDenied",
        "The proxy needs a login. Add user and password to HTTPS_PROXY of the sync pod.",
        False,
    ),
    (
        r"Authentication failed|could not read (Username|Password)|Access denied|error: 40[13]"
        r"|Permission denied|terminal prompts disabled",
        "AccessDenied",
        "Check the Secret in volumes.workspace.secretRef (for a private repository) and its"
        " permissions.",
        False,
    ),
    (
        r"couldn't find remote ref",
        "SourceNotFound",
        "The branch or tag does not exist. A commit needs its full hash.",
        False,
    ),
    (
        r"error: 404|not found|does not exist|not appear to be a git repository|not a git repo",
        "SourceNotFound",
        "Check volumes.workspace.url. Many servers report a private repository as not found.",
        False,
    ),
    (
        r"certificate",
        "CertificateInvalid",
        "Add the certificate authority of the server as ca.crt to the Secret.",
        False,
    ),
    (
        r"Could not resolve|Name or service not known",
        "FetchFailed",
        "Check the host name.",
        False,
    ),
    (
        r"timed out|too slow|Connection refused|Failed to connect|unable to connect|unreachable",
        "FetchFailed",
        "The server does not answer. Check host, port and network policies.",
        False,
    ),
    (
        r"early EOF|hung up|reset by peer|disconnect|curl \d+|RPC failed|recv|terminated",
        "FetchFailed",
        "The connection was interrupted.",
        False,
    ),
)


def explain(stderr: str, source: str) -> SyncError:
    """Return the error of a failed git. stderr: without secrets. source: name for messages."""
    detail = _last_lines(stderr)
    for pattern, reason, advice, permanent in _EXPLANATIONS:
        if re.search(pattern, stderr, re.IGNORECASE):
            message = f"Cannot fetch {source}. {advice} (git: {detail})"
            return SyncError(reason, message, permanent=permanent)
    return SyncError("FetchFailed", f"Cannot fetch {source} (git: {detail}).", permanent=False)


def _last_lines(stderr: str) -> str:
    """Return the last lines of git without its general advice."""
    lines = [
        line for line in stderr.splitlines() if not line.startswith(("Please make", "and the"))
    ]
    telling = [
        line for line in lines if re.search("fatal|error|denied|failed|host key", line, re.I)
    ]
    text = "; ".join((telling or lines)[-3:])
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
