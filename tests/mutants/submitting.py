"""Bugs in the plugin."""

from functools import partial

from mutants.mutant import Mutant

PLUGIN = partial(Mutant, package="kubectl_torchrun")
_TESTS = "tests/unit/plugin"
UPLOAD = (f"{_TESTS}/upload/test_protocol.py", f"{_TESTS}/upload/test_deliver.py")
DELIVER = (f"{_TESTS}/upload/test_deliver.py",)
PACK = (f"{_TESTS}/upload/test_pack.py", f"{_TESTS}/upload/test_tree.py")

SUBMITTING = (
    PLUGIN(
        "a-pod-that-runs-is-asked",
        "upload/deliver.py",
        'case "Running" if _is_ready(latest):',
        'case "Running":',
        "the upload begins before the pod listens, and fails or waits for a retry",
        (*DELIVER, f"{_TESTS}/upload/test_submission.py"),
    ),
    PLUGIN(
        "busy-servers-end-the-upload",
        "cluster/client.py",
        "return self.status == 429 or self.status >= 500",
        "return self.status == 429",
        "one restart of the API server breaks an upload of an hour off",
        UPLOAD,
    ),
    PLUGIN(
        "an-upload-begins-again-each-time",
        "upload/protocol.py",
        "offset = response.offset if response.sha256 == self.sha256 else 0",
        "offset = 0",
        "an upload over a bad line never ends",
        UPLOAD,
    ),
    PLUGIN(
        "an-offset-of-another-archive-counts",
        "upload/protocol.py",
        "offset = response.offset if response.sha256 == self.sha256 else 0",
        "offset = response.offset",
        "two halves of two archives are joined, and the digest refuses them",
        UPLOAD,
    ),
    PLUGIN(
        "nothing-is-ever-given-up",
        "upload/protocol.py",
        "if now - self._progress_at > self._backoff.give_up:",
        "if now < 0:",
        "a submit in a script hangs for ever where the pod makes no progress",
        UPLOAD,
    ),
    PLUGIN(
        "retry-after-is-not-heeded",
        "upload/protocol.py",
        "self._then(Sleep(max(delay, min(retry_after or 0.0, self._backoff.longest))), GetState())",
        "self._then(Sleep(delay), GetState())",
        "a busy API server is asked again sooner than it says",
        UPLOAD,
    ),
    PLUGIN(
        "a-file-that-changes-is-sent",
        "upload/pack.py",
        "if _add(archive, entry, source, advance) != entry.sha256:",
        "if not _add(archive, entry, source, advance):",
        "half an edit is trained, and the manifest says another digest",
        PACK,
    ),
    PLUGIN(
        "zeros-are-sent-and-refused",
        "upload/pack.py",
        "if unpacked > limits.ratio_floor and unpacked > size * limits.ratio:",
        "if False:",
        "an hour of upload ends in the refusal of a decompression bomb",
        PACK,
    ),
    PLUGIN(
        "keys-go-along",
        "upload/sensitive.py",
        '        "*.pem",\n',
        "",
        "a private key in the directory lands in the workspace of everybody in the namespace",
        (f"{_TESTS}/upload/test_tree.py", f"{_TESTS}/upload/test_gitignore.py"),
    ),
    PLUGIN(
        "a-refused-workspace-is-waited-for",
        "upload/deliver.py",
        "if sync.permanent:",
        "if not sync.permanent:",
        "a submit waits ten minutes for what the pod has refused for good",
        (*DELIVER, f"{_TESTS}/upload/test_submission.py"),
    ),
)
