"""Uploads to a real torchrun-sync through a pod proxy with faults."""

import io
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import msgspec
import pytest
from aiohttp import web
from msgspec import structs

from kubectl_torchrun.cluster.backoff import Retries
from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.http_client import HttpClient
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.kubectl import ClusterNamespace
from kubectl_torchrun.cluster.slices import JobSlice
from kubectl_torchrun.errors import RunProblem, UploadProblem
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload.cache import LastUpload, UploadCache, Workspace
from kubectl_torchrun.upload.deliver import Arrived, deliver, find_pod
from kubectl_torchrun.upload.tree import scan
from kubectl_torchrun.upload.upload_token import token_sha256
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod

from ..laptop import Laptop, play_controller
from ..pod_proxy import PodProxy, SyncPod

pytestmark = pytest.mark.long  # processes

HERE = ClusterNamespace("https://cluster", "ns")

HASTY = Retries(first=0.01, longest=0.1, give_up=600)
SHA = "ab" * 32
WEIGHTS = Random(1).randbytes(18 << 20)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Three ranges of incompressible bytes."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "weights.bin").write_bytes(WEIGHTS)
    (root / "train.py").write_text("print('hello')\n")
    return UploadCache(HERE, root).digest(scan(root))


@pytest.fixture
async def pod(tmp_path: Path, workspace: Workspace) -> AsyncIterator[SyncPod]:
    running = SyncPod(tmp_path / "claim", workspace.manifest.sha256)
    await running.start()
    yield running
    running.kill()


def sync_pod(
    sha256: str = SHA,
    phase: str = "Running",
    message: str = "",
    number: int = 0,
    token: str = "",
) -> Pod:
    state: JsonObject = (
        {"running": {}} if phase == "Running" else {"terminated": {"message": message}}
    )
    metadata: JsonObject = {
        "name": f"job-sync-{number}",
        "labels": {"app.kubernetes.io/component": "sync"},
        "annotations": {
            "torchrun.ai/workspace-sha256": sha256,
            "torchrun.ai/upload-token-sha256": token,
        },
    }
    statuses: JsonObject = {"name": "sync", "ready": phase == "Running", "state": state}
    status: JsonObject = {"phase": phase, "containerStatuses": [statuses]}
    return msgspec.convert({"metadata": metadata, "status": status}, Pod)


def job(
    phase: str = "Syncing", reason: str = "", ready: bool = False, sha256: str = SHA
) -> JobSlice:
    condition = {"type": "WorkspaceReady", "status": "True" if ready else "False"}
    return msgspec.convert(
        {
            "metadata": {"name": "job", "annotations": {"torchrun.ai/workspace-sha256": sha256}},
            "status": {"phase": phase, "reason": reason, "message": "m", "conditions": [condition]},
        },
        JobSlice,
    )


@asynccontextmanager
async def within_reach(
    pod: SyncPod, workspace: Workspace, trouble: float = 0.0, seed: int = 0
) -> AsyncIterator[tuple[Api, JobWatch, PodProxy]]:
    proxy = PodProxy(pod, trouble, Random(seed))
    async with proxy.serve() as url, HttpClient(url) as client:
        api = Api(client, "ns", HASTY)
        job_watch = JobWatch(api, "job")
        job_watch.show_job(job(sha256=workspace.manifest.sha256))
        job_watch.show_pods({"job-sync-0": sync_pod(workspace.manifest.sha256)})

        async def play_kubelet() -> None:
            await pod.success()
            ended = sync_pod(workspace.manifest.sha256, "Succeeded", pod.termination.read_text())
            job_watch.show_pods({"job-sync-0": ended})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play_kubelet)
            yield api, job_watch, proxy
            tasks.cancel_scope.cancel()


def terminal() -> Display:
    return Display(io.StringIO(), io.StringIO())


def check_tree(pod: SyncPod, workspace: Workspace) -> None:
    marker = json.loads((pod.directory / ".sync_success").read_text())
    assert marker["sha256"] == workspace.manifest.sha256
    held = {path.name: path.read_bytes() for path in (pod.directory / "revisions/1/tree").iterdir()}
    assert held["weights.bin"] == WEIGHTS
    assert held["train.py"] == b"print('hello')\n"


async def test_an_upload_becomes_the_workspace(pod: SyncPod, workspace: Workspace) -> None:
    async with within_reach(pod, workspace) as (api, job_watch, _):
        await deliver(api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=HASTY)
    await pod.success()
    check_tree(pod, workspace)


@pytest.mark.parametrize("seed", range(5))
async def test_an_upload_survives_faults_of_the_api_server(
    pod: SyncPod, workspace: Workspace, seed: int
) -> None:
    async with within_reach(pod, workspace, trouble=0.5, seed=seed) as (api, job_watch, proxy):
        await deliver(api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=HASTY)
    assert proxy.went_wrong
    check_tree(pod, workspace)


async def test_an_upload_resumes_in_the_next_pod(pod: SyncPod, workspace: Workspace) -> None:
    async with within_reach(pod, workspace) as (api, job_watch, proxy):
        proxy.kill_at = [5 << 20]
        await deliver(api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=HASTY)
        assert not proxy.kill_at
    check_tree(pod, workspace)


async def test_an_archive_that_the_job_does_not_name_is_refused(
    tmp_path: Path, workspace: Workspace
) -> None:
    pod = SyncPod(tmp_path / "claim", "0" * 64)
    await pod.start()
    try:
        async with within_reach(pod, workspace) as (api, job_watch, _):
            with pytest.raises(UploadProblem, match=r"UploadDenied"):
                await deliver(
                    api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=HASTY
                )
    finally:
        pod.kill()


@pytest.mark.parametrize("right", [True, False], ids=["the token", "another token"])
async def test_a_standby_pod_accepts_an_upload_with_the_token(
    tmp_path: Path, workspace: Workspace, right: bool
) -> None:
    pod = SyncPod(tmp_path / "claim", "", token_sha256("t" if right else "another"))
    await pod.start()
    try:
        async with within_reach(pod, workspace) as (api, job_watch, _):
            job_watch.show_pods({"job-sync-0": sync_pod("", token=token_sha256("t"))})
            sending = deliver(
                api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=HASTY
            )
            if right:
                await sending
                check_tree(pod, workspace)
            else:
                with pytest.raises(UploadProblem, match=r"UploadDenied.*kubectl torchrun sync"):
                    await sending
    finally:
        pod.kill()


async def test_only_the_edit_is_sent(tmp_path: Path, workspace: Workspace, pod: SyncPod) -> None:
    async with within_reach(pod, workspace) as (api, job_watch, _):
        first = await deliver(
            api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=HASTY
        )
    assert first.revision == 1
    assert first.sent_bytes > len(WEIGHTS)
    await pod.success()
    memory = UploadCache(HERE, workspace.tree.root)
    memory.record(LastUpload("job", workspace.manifest))
    (workspace.tree.root / "train.py").write_text("print('edited')\n")
    edited = memory.digest(scan(workspace.tree.root))
    assert edited.previous
    assert edited.previous.job == "job"
    again = SyncPod(pod.directory, edited.manifest.sha256)
    await again.start()
    try:
        async with within_reach(again, edited) as (api, job_watch, _):
            second = await deliver(
                api, job_watch, terminal(), edited, pod_wait=60, token="t", backoff=HASTY
            )
    finally:
        again.kill()
    assert (second.revision, second.files) == (2, 1)
    assert second.sent_bytes < 1000
    assert (pod.directory / "revisions/2/tree/train.py").read_text() == "print('edited')\n"


async def test_an_upload_broken_ten_times_at_random_arrives_identical(
    tmp_path: Path, workspace: Workspace, pod: SyncPod
) -> None:
    random = Random(3)
    async with within_reach(pod, workspace) as (api, job_watch, proxy):
        proxy.kill_at = [random.randrange(1, 1 << 20) for _ in range(10)]
        await deliver(api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=HASTY)
        assert not proxy.kill_at
    check_tree(pod, workspace)


async def test_the_wait_for_a_listening_pod_is_bounded(pod: SyncPod, workspace: Workspace) -> None:
    pod.kill()
    impatient = Retries(first=0.01, longest=0.05, give_up=0.3)
    async with within_reach(pod, workspace) as (api, job_watch, _):
        with pytest.raises(UploadProblem, match=r"GaveUp"):
            await deliver(
                api, job_watch, terminal(), workspace, pod_wait=60, token="t", backoff=impatient
            )


async def test_a_full_temporary_directory_is_named(pod: SyncPod, workspace: Workspace) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with within_reach(pod, workspace) as (api, job_watch, _):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(UploadProblem, match=r"File too large.* set TMPDIR"):
                await deliver(api, job_watch, terminal(), workspace, pod_wait=60, token="t")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("missing", [(0, 10**12), (-1, 0), (1, 0), (2, 2), (0, 0)])
def test_a_pod_may_request_only_files_of_the_workspace(
    laptop: Laptop, missing: tuple[int, int]
) -> None:
    """Entry 0 is a directory, entry 1 is train.py."""
    Path("empty").mkdir()
    play_controller(laptop.server)

    def request_files(request: web.Request) -> web.Response | None:
        if laptop.server.announced is None or not request.path.endswith("/v1/upload"):
            return None
        sha256 = laptop.server.announced.sha256
        return web.json_response({"state": "waiting", "workspace": sha256, "missing": [missing]})

    laptop.server.hooks.append(request_files)
    result = laptop.run("submit", "--name", "run", "x")
    assert result.exit_code == 3, result.output
    assert "the pod requests files that" in result.stderr.lower()
    assert "kubectl torchrun sync run" in result.stderr


async def test_a_timeout_shows_the_message_of_the_job(pod: SyncPod, workspace: Workspace) -> None:
    async with within_reach(pod, workspace) as (api, job_watch, _):
        job_watch.pods = {}
        job_watch.job = job(reason="ClaimPending", sha256=workspace.manifest.sha256)
        with pytest.raises(UploadProblem, match=r"within 0 s \(ClaimPending: m\)"):
            await deliver(api, job_watch, terminal(), workspace, pod_wait=0.2, token="t")


async def found(observed: JobSlice | None, *pods: Pod) -> str | Arrived | None:
    job_watch = JobWatch(Api(HttpClient(), "ns", HASTY), "job")
    job_watch.show_job(observed)
    job_watch.show_pods({pod.metadata.name: pod for pod in pods})
    return find_pod(job_watch, SHA)


async def test_which_pod_gets_the_upload() -> None:
    assert await found(job()) is None
    assert await found(job(), sync_pod()) == "job-sync-0"
    assert await found(job(), sync_pod("")) == "job-sync-0"
    assert await found(job(), sync_pod("cd" * 32)) is None
    assert await found(job(), sync_pod("", token="another")) is None, (
        "the pod would refuse the upload"
    )
    assert await found(job(), sync_pod(token="another")) == "job-sync-0", "the pod of this digest"
    assert await found(job(), sync_pod(phase="Pending")) is None
    assert await found(job(), sync_pod(phase="Failed"), sync_pod(number=1)) == "job-sync-1"
    assert await found(job(), sync_pod(number=9), sync_pod(number=10)) == "job-sync-10"


async def test_a_running_pod_gets_no_request_before_it_is_ready() -> None:
    (status,) = sync_pod().status.container_statuses
    starting = structs.replace(status, ready=False)
    pod = sync_pod()
    deaf = structs.replace(pod, status=structs.replace(pod.status, container_statuses=(starting,)))
    assert await found(job(), deaf) is None
    assert await found(job(), pod) == "job-sync-0"


async def test_when_the_upload_is_complete() -> None:
    assert await found(job(ready=True)) == Arrived()
    made = json.dumps({"sha256": SHA, "revision": 4})
    assert await found(job(), sync_pod(phase="Succeeded", message=made)) == Arrived(4)
    assert await found(job(), sync_pod("", phase="Succeeded", message=made)) == Arrived(4)
    assert await found(job(), sync_pod("", phase="Succeeded")) is None
    assert await found(job(ready=True, sha256="cd" * 32)) is None


async def test_when_no_upload_is_possible() -> None:
    refusal = '{"reason":"InvalidFile","message":"x is a link","permanent":true}'
    passing = '{"reason":"WorkspaceFull","message":"full","permanent":false}'
    with pytest.raises(UploadProblem, match=r"InvalidFile\): x is a link"):
        await found(job(), sync_pod(phase="Failed", message=refusal))
    assert await found(job(), sync_pod(phase="Failed", message=passing)) is None
    with pytest.raises(RunProblem, match=r"deleted"):
        await found(None)
    with pytest.raises(RunProblem, match=r"Failed \(Why\): m"):
        await found(job("Failed", "Why"))
    with pytest.raises(RunProblem, match=r"spec of the job is invalid: m"):
        await found(job("Pending", "InvalidSpec"))
