"""The manifests agree with each other and grant no further permissions."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from roles import granted
from torchrun_controller.reconcile.schedulers.scheduler import GangScheduler
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS

MANIFESTS = Path(__file__).parents[3] / "manifests"
FOLDERS = ("crd", "controller", "rbac")
KUSTOMIZATION = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text(encoding="utf-8"))


def documents() -> list[dict[str, Any]]:
    return [
        document
        for folder in FOLDERS
        for path in sorted((MANIFESTS / folder).glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for document in documents() for rule in document.get("rules", [])]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_names_all_its_manifests(folder: str) -> None:
    present = sorted(path.name for path in (MANIFESTS / folder).glob("*.yaml"))
    named = yaml.safe_load((MANIFESTS / folder / "Kustomization").read_text(encoding="utf-8"))
    assert sorted(named["resources"]) == present
    assert "kustomization.yaml" not in present, "kubectl apply -f would fail"


def test_the_kustomization_names_every_folder() -> None:
    assert tuple(KUSTOMIZATION["resources"]) == FOLDERS


@pytest.mark.parametrize("rule", rules(), ids=lambda r: ",".join(r["resources"]))
def test_no_role_has_a_wildcard_or_reads_secrets(rule: dict[str, Any]) -> None:
    assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
    assert not {"roles", "clusterroles"} & set(rule["resources"])
    assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]


def test_job_pods_get_the_controllers_own_image() -> None:
    (deployment,) = (d for d in documents() if d["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    (image,) = KUSTOMIZATION["images"]
    assert env["TORCHRUN_RUNTIME_IMAGE"] == container["image"]
    assert container["image"] == f"{image['newName']}:{image['newTag']}"


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=lambda scheduler: scheduler.api.name)
def test_the_role_grants_the_groups_of_each_scheduler(scheduler: GangScheduler) -> None:
    verbs: tuple[str, ...] = ("list", "watch")
    if scheduler.creates_groups:
        verbs = (*verbs, "get", "create", "patch", "delete")
    needed = {(verb, kind.resource) for verb in verbs for kind in scheduler.kinds}
    assert needed <= granted("torchrun-controller")
