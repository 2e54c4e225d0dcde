"""The page on troubleshooting has every reason that the code can write.

Every CamelCase string in that code counts as a reason, unless it is listed here as another term of
Kubernetes, git, ssh, S3 or this project.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT
from torchrun_api.kinds.status import PHASES
from torchrun_controller.reconcile.gang.failures import DISRUPTIONS, POD_VERDICTS

PAGE = ROOT / "docs" / "troubleshooting.md"
CONTROLLER = ROOT / "controller" / "torchrun_controller"
RUNTIME = ROOT / "runtime" / "torchrun_runtime"
WRITERS = (CONTROLLER / "reconcile", CONTROLLER / "controllers", RUNTIME)
# Settings of ssh and values of the Pod Security Standards have this form.
LEFT_OUT = {
    RUNTIME / "sync" / "git" / "login.py",
    CONTROLLER / "reconcile" / "objects" / "security.py",
}
REASON = re.compile(r"([A-Z][a-z]+)([A-Z][A-Za-z]*)*|OOMKilled")
OTHER_WORDS = """
AccessKey AdmissionRequested Always Authorization Background Bearer Bound BrokenPipeError Cc Cf ChildFailedError ClusterFirstWithHostNet Code
Complete ContainerCreating Contents Cs DirectoryOrCreate DisruptionTarget Distributed EncodingType ErrImageNeverPull FailureTarget
ErrImagePull Error Exists FailedAttachVolume FailedCreate FailedMount
FallbackToLogsOnError False Finished FullSize Gone IfNotPresent ImageInspectError
ImagePullBackOff In Indexed Ingress InvalidImageName IsTruncated Job KaiQueueReady Key KeyboardInterrupt Lost
MainProcess
InPlace Karpenter Libfabric Memory Message Never NextContinuationToken NoExecute NoSchedule NoSuchBucket Node None Normal
NotIn NotYetSupported OnFailure OnRootMismatch PersistentVolumeClaim Pod
PodGroup PodGroupInitiallyScheduled PodGroupScheduled PodInitializing PodReadyToStartContainers
PodScheduled QueueReady QuotaReserved ReadOnlyMany ReadWriteMany ReadWriteOnce
ReadWriteOncePod Secret StorageReady
Refused RegistryUnavailable RequestTimeTooSkewed Resumed Running RuntimeDefault Scheduled Server
Service SigCgt SigIgn Size SlowNetwork Socket Succeeded SuccessCriteriaMet TemplateValid ToBeDeletedByClusterAutoscaler True Unknown UnschedulableOnNodePool Updating
Warning Workload WorkspaceReady WritesAccepted Written
"""
NO_REASONS = frozenset(OTHER_WORDS.split())


def words(path: Path) -> Iterator[str]:
    """The strings of this form in a module, without those that are types."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hints = {
        id(inner)
        for node in ast.walk(tree)
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if hint is not None
        for inner in ast.walk(hint)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            hints |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and id(node) not in hints and REASON.fullmatch(value):
            yield value


def reasons() -> set[str]:
    paths = {path for folder in WRITERS for path in folder.rglob("*.py")} - LEFT_OUT
    in_code = {word for path in paths for word in words(path)}
    return (in_code - NO_REASONS) | DISRUPTIONS | POD_VERDICTS


def source() -> str:
    return "\n".join(path.read_text() for folder in WRITERS for path in folder.rglob("*.py"))


def explained() -> set[str]:
    page = PAGE.read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    return {*headings, *(word.strip() for cell in cells for word in cell.split(","))}


def test_every_reason_is_documented() -> None:
    left = reasons() - explained()
    assert not left, f"say in {PAGE.name} what these mean, or list them here as no reasons: {left}"


def test_every_documented_reason_is_written() -> None:
    named = {word for word in explained() if REASON.fullmatch(word)}
    assert {word for word in named - set(PHASES) if f'"{word}"' not in source()} == set()


def test_the_list_of_other_words_has_no_stale_entries() -> None:
    assert {word for word in NO_REASONS if f'"{word}"' not in source()} == set()
    assert NO_REASONS & explained() <= set(PHASES)


def test_quoted_messages_of_the_plugin_exist() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## The plugin\n")[2]
    quotes = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[1:]
    modules = (ROOT / "plugin" / "kubectl_torchrun").rglob("*.py")
    words = "\n".join(
        "".join(str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))
        for path in modules
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    )
    phrases = {phrase for phrase in quotes if not phrase.startswith(("exit code", "---"))}
    assert len(phrases) > 8
    assert {phrase for phrase in phrases if phrase not in words} == set()
