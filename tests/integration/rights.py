"""Enforced roles: controllers with the token of a ServiceAccount, and the audit log."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.controller_process import ControllerProcess
from log_files import read_complete_lines
from roles import documents, named
from torchrun_cluster import LocalCluster

NAMESPACE = "torchrun-system"


class Audit:
    """Entries of the audit log by ServiceAccounts of the controller's namespace.

    Give `flags` to the API server.
    """

    def __init__(self, folder: Path) -> None:
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "rules": [
                {
                    "level": "Metadata",
                    "userGroups": ["system:serviceaccounts"],
                    "omitStages": ["RequestReceived"],
                },
                {"level": "None"},
            ],
        }
        self._log = folder / "audit.log"
        (folder / "policy.json").write_text(json.dumps(policy))
        self.flags = [
            f"--audit-policy-file={folder}/policy.json",
            f"--audit-log-path={self._log}",
        ]

    def entries(self, account: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """Requests of one account about resources."""
        user = f"system:serviceaccount:{namespace}:{account}"
        lines = read_complete_lines(self._log)
        entries_of_user = (json.loads(line) for line in lines if user.encode() in line)
        return [e for e in entries_of_user if e["user"]["username"] == user and "objectRef" in e]


def right(entry: dict[str, Any]) -> tuple[str, str]:
    """Verb and resource of a request."""
    about = entry["objectRef"]
    part = f"/{about['subresource']}" if "subresource" in about else ""
    return entry["verb"], named(about["resource"] + part, about.get("apiGroup", ""))


def used(entries: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """The used permissions. Creating an object by server-side apply also needs create."""
    used_rights = {right(entry) for entry in entries}
    creations = [e for e in entries if e["verb"] == "patch" and e["responseStatus"]["code"] == 201]
    return used_rights | {("create", right(entry)[1]) for entry in creations}


def denied(entries: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """The missing permissions."""
    return {right(entry) for entry in entries if entry["responseStatus"]["code"] == 403}


def grant(
    cluster: LocalCluster, account: str, *, without: tuple[tuple[str, str], ...] = ()
) -> None:
    """Apply the roles of the manifests for the account, without some pairs of verb and resource."""
    cluster.kubectl("create", "namespace", NAMESPACE, check=False)
    cluster.kubectl("create", "serviceaccount", account, "-n", NAMESPACE, check=False)
    for document in documents():
        text = json.dumps({**document, "rules": _rules(document, without)})
        body = json.loads(text.replace('"torchrun-controller', f'"{account}'))
        if document["kind"].endswith("Binding"):
            del body["rules"]
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))


def _rules(document: dict[str, Any], without: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": verbs}
        for rule in document.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if (verbs := [v for v in rule["verbs"] if (v, named(resource, group)) not in without])
    ]


def controller(
    cluster: LocalCluster,
    folder: Path,
    account: str,
    *arguments: str,
    namespace: str = NAMESPACE,
) -> ControllerProcess:
    """A controller that authenticates with a token of the account only."""
    token = cluster.kubectl("create", "token", account, "-n", namespace).stdout.strip()
    config = json.loads(cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    folder.mkdir(exist_ok=True)
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return ControllerProcess(cluster, folder, "--kubeconfig", str(path), *arguments)
