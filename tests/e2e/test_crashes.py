"""Killed controllers and a restarted API server: jobs continue, and nothing is created twice."""

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e import controller
from e2e.controller import HostController
from e2e.history import History
from e2e.manifests import job
from e2e.space import Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS, SERVICES, TORCHRUN_JOBS

COMMAND = "python3 run.py"
SCRIPT = "import time; print('started', flush=True); time.sleep(4); print('done')"
UPLOAD_BYTES = 24 << 20


def component(name: str, phase: str = "") -> Callable[[JsonObject], bool | None]:
    """A predicate for pods of a component, optionally in a phase."""

    def holds(pod: JsonObject) -> bool | None:
        labels = pod["metadata"]["labels"]
        mine = labels.get("app.kubernetes.io/component") == name
        return (mine and phase in ("", pod["status"].get("phase"))) or None

    return holds


@contextmanager
def submitted(space: Space, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Submit and follow a job on two nodes until the end of the block."""
    (directory / "run.py").write_text(SCRIPT)
    (directory / "noise").write_bytes(random.Random(0).randbytes(UPLOAD_BYTES))
    options = ("--queue", "plain", "--nodes", "2", "--name", "hardy")
    command = space.submit_command(f"echo begin && {COMMAND}", *options)
    with subprocess.Popen(
        command,
        cwd=directory,
        env=space.cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def assert_succeeds(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    print(output)
    assert process.returncode == 0
    assert output.count("[0] done") == output.count("[1] done") == 1


def assert_once(*histories: History) -> None:
    """Check that every object of the job was created once, in one attempt."""
    for history in histories:
        for name, uids in history.uids().items():
            assert len(uids) == 1, f"{name} was made {len(uids)} times"


def test_a_controller_killed_at_any_time(space: Space, tmp_path: Path):
    directory = tmp_path / "project"
    directory.mkdir()
    kinds = (TORCHRUN_JOBS, PODS, JOBS, CLAIMS, SERVICES)
    with (
        controller.no_deployment(space.cluster),
        space.histories(*kinds) as (jobs, pods, children, claims, services),
        HostController(space, tmp_path / "controller.log").running() as process,
        submitted(space, directory) as run,
    ):
        jobs.until(lambda _: True)
        process.kill()
        claims.until(lambda _: True)
        process.kill()
        pods.until(component("sync"))
        process.kill()
        pods.until(component("sync", "Running"))
        controller.uploading(space, pods, "hardy-sync-0")
        process.kill()
        children.until(lambda _: True)
        process.kill()
        pods.until(component("worker", "Running"))
        process.kill()
        pods.until(component("worker", "Succeeded"))
        process.kill()
        assert_succeeds(run)
        assert_once(jobs, pods, children, claims, services)
        assert list(children.uids()) == ["hardy"]
        syncs = {p["metadata"]["name"] for p in pods.states() if component("sync")(p)}
        assert syncs == {"hardy-sync-0"}
        assert len(pods.uids()) == 3
        assert process.kills == 7


@pytest.mark.long
def test_the_container_of_the_controller_restarts(space: Space, tmp_path: Path):
    with (
        space.histories(PODS, JOBS) as (pods, children),
        submitted(space, tmp_path) as run,
    ):
        pods.until(component("sync", "Running"))
        pod = controller.pod_of_deployment(space)
        restarts = pod["status"]["containerStatuses"][0]["restartCount"]
        if space.cluster.local is None:
            name = pod["metadata"]["name"]
            space.cluster.kubectl(
                *("delete", "pod", "-n", controller.NAMESPACE, name, "--grace-period=0", "--force")
            )
        else:
            controller.kill_in_pod(pod)
            controller.wait_restarted(space, restarts + 1)
        assert_succeeds(run)
        assert_once(pods, children)


@pytest.mark.long
def test_the_api_server_restarts_with_a_compacted_history(space: Space):
    local = space.cluster.local
    if local is None:
        pytest.skip("the API server of this cluster is not ours to restart")
    before = lists(space)
    with space.histories(TORCHRUN_JOBS, PODS, JOBS) as (jobs, pods, children):
        command = ["python3", "-c", "import time; time.sleep(8)"]
        space.apply(job("lasting", "plain", command, 2))
        jobs.until(lambda j: j.get("status", {}).get("phase") == "Running" or None)
        local.compact_etcd()
        local.restart("kube-apiserver")
        jobs.until(lambda j: j.get("status", {}).get("phase") == "Succeeded" or None)
        assert_once(pods, children)
    after = lists(space)
    again = {kind: after[kind] - before.get(kind, 0) for kind in after}
    print("lists:", before, "and after the restart:", again)
    assert len(again) == 9
    # PVCs of jobs and PVCs of queues have two watches.
    watches = {"persistentvolumeclaims": 2}
    assert all(count <= watches.get(kind, 1) for kind, count in again.items()), again


def lists(space: Space) -> dict[str, float]:
    """The number of complete lists of each kind by the controller."""
    return {
        series.split('"')[1]: value
        for series, value in controller.metrics(space).items()
        if series.startswith("torchrun_watch_lists_total{")
    }
