"""Security contexts of workers: defaults, fields of the user, and refusals."""

from typing import Any

import msgspec
import pytest

from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import resolve
from world import DEFAULTS, World, make_job, make_queue


def of_trainer(**context: object) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", "securityContext": context}]}


def pod(job: dict[str, Any] | None = None, **queue: Any) -> dict[str, Any]:
    asked = make_job(numNodes=1, podTemplate={"spec": job or {}})
    laid_down = make_queue(**queue)
    template = worker_template(asked, laid_down, resolve(asked, laid_down), None, 0, "", DEFAULTS)
    return msgspec.json.decode(msgspec.json.encode(template["spec"]))


def trainer(made: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in made["containers"] if c["name"] == "trainer")


def context(made: dict[str, Any]) -> dict[str, Any]:
    return trainer(made)["securityContext"]


def test_the_default_allows_root_and_a_writable_file_system() -> None:
    made = pod()
    assert made["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert context(made) == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["MKNOD", "NET_RAW"]},
    }


@pytest.mark.parametrize("level", [None, "baseline"])
def test_fields_of_the_user_override_the_defaults(level: str | None) -> None:
    made = pod(
        of_trainer(allowPrivilegeEscalation=True, capabilities={"add": ["SYS_CHROOT"]})
        | {"securityContext": {"seccompProfile": {"type": "Localhost"}, "runAsUser": 7}},
        podSecurity=level,
    )
    assert made["securityContext"] == {"seccompProfile": {"type": "Localhost"}, "runAsUser": 7}
    assert context(made) == {
        "allowPrivilegeEscalation": True,
        "capabilities": {"add": ["SYS_CHROOT"], "drop": ["MKNOD", "NET_RAW"]},
    }


def test_the_context_of_the_queue_overrides_the_users() -> None:
    made = pod(of_trainer(runAsUser=0, runAsGroup=5), securityContext={"runAsUser": 1000})
    assert context(made)["runAsUser"] == 1000
    assert context(made)["runAsGroup"] == 5


def test_a_privileged_container_is_left_as_it_is() -> None:
    """The API server refuses `allowPrivilegeEscalation: false` beside it."""
    assert context(pod(of_trainer(privileged=True))) == {"privileged": True}


def test_restricted_is_filled_in_on_every_container() -> None:
    made = pod(
        {
            "containers": [{"name": "exporter"}],
            "initContainers": [{"name": "warm", "securityContext": {"runAsUser": 5}}],
        },
        podSecurity="restricted",
    )
    assert made["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    contexts = {
        c["name"]: c["securityContext"] for c in made["containers"] + made["initContainers"]
    }
    common = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert contexts["trainer"] == contexts["exporter"] == common
    assert contexts["warm"] == common | {"runAsUser": 5}
    assert contexts["launcher"]["readOnlyRootFilesystem"] is True


def test_an_unknown_user_gets_a_home_and_a_name() -> None:
    def variables(made: dict[str, Any]) -> dict[str, str]:
        return {v["name"]: v.get("value", "") for v in trainer(made)["env"]}

    assert (
        variables(pod(podSecurity="restricted")).items()
        >= {"HOME": "/tmp", "USER": "trainer"}.items()
    )
    own = {"containers": [{"name": "trainer", "env": [{"name": "HOME", "value": "/scratch"}]}]}
    assert variables(pod(own, podSecurity="restricted"))["HOME"] == "/scratch"
    with_user = pod(podSecurity="restricted", securityContext={"runAsUser": 1000})
    assert "HOME" not in variables(with_user)
    assert "HOME" not in variables(pod())


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"hostPID": True}, "hostPID is true"),
        ({"hostIPC": True}, "hostIPC is true"),
        ({"volumes": [{"name": "etc", "hostPath": {"path": "/etc"}}]}, "volumes[etc].hostPath is"),
        (
            {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
            'securityContext.sysctls[kernel.msgmax].name is "kernel.msgmax"',
        ),
        (
            {"containers": [{"name": "trainer", "ports": [{"containerPort": 1, "hostPort": 1}]}]},
            "containers[trainer].ports[0].hostPort is 1",
        ),
        (of_trainer(privileged=True), "containers[trainer].securityContext.privileged is true"),
        (of_trainer(procMount="Unmasked"), 'securityContext.procMount is "Unmasked"'),
        (of_trainer(capabilities={"add": ["SYS_ADMIN"]}), "capabilities.add is"),
        (of_trainer(seccompProfile={"type": "Unconfined"}), "seccompProfile.type is"),
        (
            {"initContainers": [{"name": "a", "securityContext": {"privileged": True}}]},
            "initContainers[a].securityContext.privileged is true",
        ),
        ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "seLinuxOptions.type is"),
        *(
            (
                {kind: [{"name": "a", caller: {action: {"host": "10.0.0.1", "port": 80}}}]},
                f"{kind}[a].{caller}.{action}.host is",
            )
            for kind in ("containers", "initContainers")
            for caller in ("livenessProbe", "readinessProbe", "startupProbe")
            for action in ("httpGet", "tcpSocket")
        ),
        *(
            (
                {"containers": [{"name": "a", "lifecycle": {hook: {"httpGet": {"host": "h"}}}}]},
                f"containers[a].lifecycle.{hook}.httpGet.host is",
            )
            for hook in ("postStart", "preStop")
        ),
    ],
)
def test_baseline_refuses_access_to_the_host(spec: dict[str, Any], named: str) -> None:
    for level in ("baseline", "restricted"):
        with pytest.raises(InvalidSpecError) as caught:
            pod(spec, podSecurity=level)
        assert str(caught.value).startswith("podTemplate.spec.")
        assert named in str(caught.value)
        assert f"podSecurity {level} of TorchrunQueue gpu accepts" in str(caught.value)
    pod(spec)  # without a level it is between the job and its namespace


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (of_trainer(runAsUser=0), "containers[trainer].securityContext.runAsUser is 0"),
        (of_trainer(runAsNonRoot=False), "securityContext.runAsNonRoot is false"),
        ({"securityContext": {"runAsNonRoot": False}}, "spec.securityContext.runAsNonRoot is"),
        ({"securityContext": {"runAsNonRoot": None}}, "securityContext.runAsNonRoot is null"),
        ({"securityContext": {"seccompProfile": None}}, "seccompProfile.type is null"),
        (of_trainer(allowPrivilegeEscalation=None), "allowPrivilegeEscalation is null"),
        (of_trainer(allowPrivilegeEscalation=True), "allowPrivilegeEscalation is true"),
        (of_trainer(capabilities={"drop": ["KILL"]}), 'capabilities.drop is ["KILL"]'),
        (of_trainer(capabilities={"drop": None}), "capabilities.drop is null"),
        (of_trainer(capabilities={"add": ["CHOWN"]}), 'add is ["CHOWN"]'),
        (
            {"volumes": [{"name": "d", "nfs": {"server": "s", "path": "/"}}]},
            "volumes[d] is",
        ),
        (
            {"containers": [{"name": "x", "securityContext": {"runAsUser": 0}}]},
            "containers[x].securityContext.runAsUser is 0",
        ),
    ],
)
def test_restricted_refuses_more(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        pod(spec, podSecurity="restricted")
    assert named in str(caught.value)
    pod(spec, podSecurity="baseline")


def test_the_images_own_user_is_taken_where_a_template_says_null() -> None:
    made = pod({"securityContext": {"runAsUser": None}}, podSecurity="restricted")
    assert "runAsUser" not in made["securityContext"]
    assert made["securityContext"]["runAsNonRoot"] is True
    assert all(v["name"] != "HOME" for v in trainer(made)["env"])


def test_invalid_types_are_left_to_the_api_server() -> None:
    shapes: dict[str, Any] = {
        "containers": ["x", {"name": "y", "securityContext": "z", "ports": 1}],
        "volumes": ["v"],
        "securityContext": {"sysctls": "s"},
    }
    assert "x" in pod(shapes)["containers"]
    with pytest.raises(InvalidSpecError, match=r"volumes\[0\] is \"v\""):
        pod({"volumes": ["v"]}, podSecurity="restricted")
    with pytest.raises(InvalidSpecError, match=r"\[y\].securityContext"):
        pod({"containers": [shapes["containers"][1]]}, podSecurity="restricted")


def test_a_refusal_is_reported_before_the_workspace() -> None:
    job = make_job(
        numNodes=1,
        podTemplate={"spec": {"hostPID": True}},
        volumes={"workspace": {"source": "zip"}},
    )
    world = World(job, make_queue(podSecurity="baseline"))
    world.step()
    assert world.job.status.reason == "InvalidSpec"
    assert "hostPID is true" in world.job.status.message
    assert world.created == []


def test_a_restart_of_an_isolated_job_applies_its_policy_again() -> None:
    world = World(make_job(numNodes=2), make_queue(networking={"isolate": True}))
    world.settle()
    policy = ("networkpolicies", "train")
    assert world.created.count(policy) == 1
    del world.objects[policy]
    world.all_workers("Running")
    world.settle()
    world.delete_child_job()
    world.settle()
    assert world.created.count(policy) == 2


@pytest.mark.parametrize("level", ["baseline", "restricted"])
@pytest.mark.parametrize(
    ("profile", "is_allowed"),
    [("runtime/default", True), ("localhost/mine", True), ("unconfined", False)],
)
def test_apparmor_by_annotation(level: str, profile: str, is_allowed: bool) -> None:
    key = "container.apparmor.security.beta.kubernetes.io/trainer"
    job = make_job(numNodes=1, podTemplate={"metadata": {"annotations": {key: profile}}})
    world = World(job, make_queue(podSecurity=level))
    world.settle()
    assert (world.job.status.reason == "InvalidSpec") is not is_allowed
