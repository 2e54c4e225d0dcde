"""`podSecurity` beside the standards of the API server: both accept a pod, or both refuse it.

A new release of Kubernetes may add a control: then a row fails that the controller still accepts.
"""

import re
from typing import Any, cast

import msgspec
import pytest

from integration.controller_process import Api, eventually
from integration.team import Team
from torchrun_api import names
from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.resolve import resolve
from world import DEFAULTS, make_job, make_queue

TRAINER = names.TRAINER_CONTAINER
ACCEPTED = "accepted"


def of_trainer(**fields: object) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": TRAINER, **fields}]}}


def of_init(**fields: object) -> dict[str, Any]:
    return {"spec": {"initContainers": [{"name": "a", "image": "i", **fields}]}}


def in_context(**fields: object) -> list[dict[str, Any]]:
    context = {"securityContext": fields}
    return [{"spec": context}, of_trainer(**context), of_init(**context)]


def in_containers(**fields: object) -> list[dict[str, Any]]:
    return [of_trainer(securityContext=fields), of_init(securityContext=fields)]


def in_user_namespace(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"spec": {**row["spec"], "hostUsers": False}} for row in rows]


def of_volume(**source: object) -> dict[str, Any]:
    return {"spec": {"volumes": [{"name": "v", **source}]}}


def annotated(**annotations: str) -> dict[str, Any]:
    prefix = "container.apparmor.security.beta.kubernetes.io/"
    return {"metadata": {"annotations": {f"{prefix}{k}": v for k, v in annotations.items()}}}


PORT = {"containerPort": 80, "protocol": "TCP"}
# Templates of jobs, by the first level that refuses them.
ROWS: dict[str, list[dict[str, Any]]] = {
    ACCEPTED: [
        {},
        of_trainer(ports=[PORT]),
        of_trainer(livenessProbe={"httpGet": {"port": 80}}),
        of_volume(emptyDir={}),
        of_volume(configMap={"name": "c"}),
        *in_context(seccompProfile={"type": "RuntimeDefault"}),
        *in_context(appArmorProfile={"type": "RuntimeDefault"}),
        *in_context(runAsUser=1000),
        *in_context(seLinuxOptions={"type": "container_t"}),
        *in_containers(capabilities={"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}),
        *in_containers(procMount="Default"),
        *in_user_namespace(*in_context(runAsUser=0), *in_context(runAsNonRoot=False)),
        *(
            {"spec": {"securityContext": {"sysctls": [{"name": name, "value": "1"}]}}}
            for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_keepalive_time")
        ),
        annotated(**{TRAINER: "runtime/default"}),
        annotated(**{TRAINER: "localhost/x"}),
    ],
    "restricted": [
        of_volume(nfs={"server": "s", "path": "/"}),
        *in_context(runAsUser=0),
        *in_context(runAsNonRoot=False),
        *in_containers(allowPrivilegeEscalation=True),
        *in_containers(capabilities={"add": ["CHOWN"], "drop": ["ALL"]}),
        *in_containers(capabilities={"drop": ["KILL"]}),
        *in_user_namespace(*in_containers(procMount="Unmasked")),
    ],
    "baseline": [
        *({"spec": {f"host{what}": True}} for what in ("Network", "PID", "IPC")),
        of_volume(hostPath={"path": "/etc"}),
        of_trainer(ports=[{**PORT, "hostPort": 80}]),
        of_init(ports=[{**PORT, "hostPort": 80}]),
        *(
            of_trainer(**{probe: {action: {"port": 80, "host": "10.0.0.1"}}})
            for probe in ("livenessProbe", "readinessProbe", "startupProbe")
            for action in ("httpGet", "tcpSocket")
        ),
        *(
            of_trainer(lifecycle={hook: {action: {"port": 80, "host": "10.0.0.1"}}})
            for hook in ("postStart", "preStop")
            for action in ("httpGet", "tcpSocket")
        ),
        *in_containers(capabilities={"add": ["SYS_ADMIN"], "drop": ["ALL"]}),
        *in_context(seccompProfile={"type": "Unconfined"}),
        *in_context(appArmorProfile={"type": "Unconfined"}),
        *in_context(seLinuxOptions={"type": "spc_t"}),
        *in_context(seLinuxOptions={"user": "u"}),
        *in_context(seLinuxOptions={"role": "r"}),
        {"spec": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}},
        annotated(**{TRAINER: "unconfined"}),
    ],
}


def template(level: str | None, pod: dict[str, Any]) -> dict[str, Any]:
    job = make_job(numNodes=1, podTemplate=pod)
    queue = make_queue(podSecurity=level)
    made = worker_template(job, queue, resolve(job, queue), None, 0, "", DEFAULTS)
    return msgspec.json.decode(msgspec.json.encode(made))


@pytest.fixture(scope="module")
def namespaces(api: Api) -> dict[str, Team]:
    """A namespace for each level, which enforces it."""
    teams = {level: Team(api) for level in ("baseline", "restricted")}
    for level, team in teams.items():
        label = {"pod-security.kubernetes.io/enforce": level}
        api.patch(f"/api/v1/namespaces/{team.name}", {"metadata": {"labels": label}})
        path = f"{team.core}/serviceaccounts/default"
        eventually("the service account", lambda path=path: api.get(path))
    return teams


@pytest.mark.parametrize("level", ["baseline", "restricted"])
@pytest.mark.parametrize(
    ("first", "row"),
    [
        pytest.param(first, row, id=f"{first}-{re.sub(r'[^A-Za-z0-9]+', '-', str(row))[:80]}")
        for first, rows in ROWS.items()
        for row in rows
    ],
)
def test_both_refuse_the_same_pods(
    namespaces: dict[str, Team], first: str, row: dict[str, Any], level: str
) -> None:
    expected = first in ("baseline", level)
    try:
        pod, ours = template(level, row), ""
    except InvalidSpecError as error:
        pod, ours = cast("dict[str, Any]", merge(template(level, {}), row)), str(error)
    assert bool(ours) == expected, ours
    team = namespaces[level]
    body = {"metadata": {"name": "p", **pod.get("metadata", {})}, "spec": pod["spec"]}
    path = f"{team.core}/pods?dryRun=All"
    answer = team.api.client.post(path, json=body)
    assert bool(answer.is_error) == expected, answer.text
    if expected:
        assert f'violates PodSecurity "{level}' in answer.json()["message"]
