"""The log line from which a decision can be repeated."""

import io
import json
from typing import Any

import pytest
from msgspec.structs import replace

from observed_log import main, plan_of
from torchrun_controller.controllers.decision_log import reconcile_logged
from torchrun_controller.logs import configure
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kai import KAI_POD_GROUPS
from world import DEFAULTS, World, make_job, make_queue

SECRET = "hidden-value"


def logged(world: World, level: Any = "debug") -> str:
    """The log of the next decision."""
    stream = io.StringIO()
    configure(level, "json", stream)
    assert reconcile_logged(world.observed(), world.now, DEFAULTS) == expected(world)
    return stream.getvalue()


def expected(world: World) -> Any:
    return reconcile(world.observed(), world.now, DEFAULTS)


@pytest.fixture
def failed() -> World:
    """A gang with a group, of which a worker has failed."""
    world = World(make_job(numNodes=2, command="train.sh"), make_queue(scheduling={"gang": "kai"}))
    resources = frozenset({(KAI_POD_GROUPS.api_version, KAI_POD_GROUPS.plural)})
    world.installed = Installed(resources=resources)
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.end_container(world.workers()[0].metadata.name, "trainer", exit_code=1)
    return world


def test_a_logged_decision_is_repeated(
    failed: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed.observed().gang.groups
    line = logged(failed)
    assert json.loads(line)["job"] == "ml/train"
    plan = plan_of(line)
    assert plan.status is not None
    assert plan.deletes
    assert plan == expected(failed)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"another line\n{line}"))
    main()
    writes = {write["type"]: write for write in json.loads(capsys.readouterr().out)["writes"]}
    assert writes["StatusWrite"]["status"]["reason"] == plan.status.reason


def test_nothing_is_logged_at_other_levels(failed: World) -> None:
    assert logged(failed, "info") == ""


def test_what_may_hold_a_secret_is_redacted_and_names_stay() -> None:
    url = f"https://user:{SECRET}@example.com/code.git"
    container = {
        "name": "sidecar",
        "command": ["sh", "-c", SECRET],
        "args": [f"--key={SECRET}"],
        "env": [{"name": "KEY", "value": SECRET}, {"name": "REF", "valueFrom": {"x": "y"}}],
        "livenessProbe": {"httpGet": {"httpHeaders": [{"name": "Key", "value": SECRET}]}},
    }
    volume = {"flexVolume": {"secretRef": {"name": "disk"}, "options": {"password": SECRET}}}
    job = make_job(
        command=f"python train.py --key {SECRET}",
        setupCommand=f"KEY={SECRET} pip install torch",
        env=[{"name": "TOKEN", "value": SECRET}],
        volumes={"workspace": {"source": "git", "url": url, "secretRef": {"name": "login"}}},
        podTemplate={"spec": {"containers": [container], "volumes": [volume]}},
    )
    last = {"kubectl.kubernetes.io/last-applied-configuration": SECRET}
    job = replace(job, metadata=replace(job.metadata, annotations=last))
    queue = make_queue(podTemplate={"spec": {"initContainers": [container]}})
    line = logged(World(job, queue))
    assert SECRET not in line
    spec = json.loads(line)["input"]["observed"]["job"]["spec"]
    assert (spec["command"], spec["setupCommand"]) == ("python ***", "***")
    for kept in ("KEY", "TOKEN", "REF", "valueFrom", "disk", "login", "user:***@example.com"):
        assert kept in line
