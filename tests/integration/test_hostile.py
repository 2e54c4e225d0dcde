"""Hostile objects on a real API server, with our schemas and CEL rules, and with open schemas.

300 each; 10,000 in `make hostile`. The seed is printed, and `HOSTILE_SEED` sets it.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hostile import objects
from hostile.world import unsaid
from integration.controller_process import Api, ControllerProcess, eventually, install_crds
from integration.team import GROUP, Team
from torchrun_api.json import JsonObject
from torchrun_api.status import MOST_GANGS, TERMINAL
from torchrun_cluster import LocalCluster, Size

SEED = int(os.environ.get("HOSTILE_SEED", "0"))
OBJECTS = int(os.environ.get("HOSTILE_OBJECTS", "300"))
AT_A_TIME = 8
# For 10,000 objects of a few KB. An idle controller without objects uses 65 MiB.
MOST_MEMORY = 400 * 2**20
# No pod runs, so a job has one. A refused gang of two Jobs is created again, once a minute.
MOST_ATTEMPTS = 30
BUG = "a bug in the controller; please report it"
PATHS = {"TorchrunJob": "torchrunjobs", "TorchrunQueue": "torchrunqueues"}
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A control plane without the Job controller: some Jobs request 10,000 pods."""
    name = f"test-hostile-{os.getpid()}"
    extra = {"kube-controller-manager": ["--controllers=*,-job-controller"]}
    with LocalCluster(name=name, size=Size.CONTROL_PLANE, extra_args=extra) as running:
        install_crds(running)
        yield running


def post(team: Team, body: JsonObject) -> int:
    path = f"{team.group}/{PATHS[str(body['kind'])]}"
    created = {name: value for name, value in body.items() if name != "status"}
    code = team.api.client.post(path, json=created).status_code
    meta, status = body["metadata"], body.get("status")
    if code == 201 and status is not None and isinstance(meta, dict):
        kind = {"Content-Type": "application/merge-patch+json"}
        team.api.client.patch(
            f"{path}/{meta['name']}/status", json={"status": _full(status)}, headers=kind
        )
    return code


def _full(value: Any) -> Any:
    """The object without what the server accepts in a status and then refuses in every apply.

    These are empty lists, and lists in place of times: the server does not check the type of a
    string that has a format. Neither does a gang follow the last one that the schema allows.
    """
    if isinstance(value, list):
        return [_full(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _full(each)
        for name, each in value.items()
        if each not in ([], {})
        and not (_is_time(name) and isinstance(each, list))
        and (name, each) != ("attempt", MOST_GANGS)
    }


def _is_time(name: str) -> bool:
    return name == "since" or name.lower().endswith("time")


def play(team: Team, controller: ControllerProcess, bodies: list[JsonObject]) -> None:
    """Create them between two valid jobs. All must get a status, without delays."""
    team.make_queue(objects.QUEUE)
    team.submit("good-before", jobQueue=objects.QUEUE)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        codes = Counter(threads.map(lambda body: post(team, body), bodies))
    print(f"HOSTILE_SEED={SEED}: {len(bodies)} objects, answers {dict(codes)}")
    assert codes[201], "no object was accepted"
    team.submit("good-after", jobQueue=objects.QUEUE)
    for name in ("good-before", "good-after"):
        team.has(f"{team.batch}/jobs/{name}")
    left: list[str] = []

    def all_said() -> bool:
        left[:] = [each for kind in PATHS for each in silent(team, kind)]
        return not left

    try:
        eventually("each object says how it stands", all_said, seconds=120 + len(bodies) / 20)
    except AssertionError:
        pytest.fail("\n".join(left[:20]))
    assert controller.is_running()
    assert [line for line in controller.lines() if line["message"] == BUG][:3] == []
    attempts = Counter(
        str(line["job"]) for line in controller.lines() if line["message"] == "attempt created"
    )
    assert [job for job, count in attempts.items() if count > MOST_ATTEMPTS] == []
    memory = peak(controller.pid)
    print(f"{memory / 2**20:.0f} MiB of memory at the most")
    assert memory < MOST_MEMORY


def silent(team: Team, kind: str) -> Iterator[str]:
    for item in team.api.items(f"{team.group}/{PATHS[kind]}"):
        if item.get("status", {}).get("phase") in TERMINAL:
            continue  # the status has a reason
        for each in unsaid({**item, "kind": kind}):
            yield f"{item['metadata']['name']}: {each} {str(item['spec'])[:1000]}"


def peak(pid: int) -> int:
    """The peak memory of the process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def drawn(number: int, *, status: bool) -> JsonObject:
    return objects.body(random.Random(f"{SEED} real {number}"), number, status=status)


def open_schemas(api: Api) -> None:
    """Allow any spec."""
    for kind in PATHS.values():
        path = f"{DEFINITIONS}/{kind}.torchrun.ai"
        definition: Any = api.get(path)
        (version,) = definition["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        schema.pop("x-kubernetes-validations", None)
        schema["properties"]["spec"] = {"x-kubernetes-preserve-unknown-fields": True}
        version["subresources"].pop("scale", None)
        api.client.put(path, json=definition).raise_for_status()
    for binding in api.items(POLICIES):
        api.delete(f"{POLICIES}/{binding['metadata']['name']}")


@pytest.mark.timeout(7200)
def test_with_our_schemas(empty_team: Team, controller: ControllerProcess) -> None:
    play(empty_team, controller, [drawn(number, status=False) for number in range(OBJECTS)])


@pytest.mark.timeout(7200)
def test_with_arbitrary_specs(api: Api, empty_team: Team, controller: ControllerProcess) -> None:
    open_schemas(api)
    odd = {"apiVersion": "torchrun.ai/v1alpha1", "kind": "TorchrunJob", "spec": [5]}
    probe = {**odd, "metadata": {"name": "9.odd"}}
    path = f"{GROUP}/namespaces/default/torchrunjobs?dryRun=All"
    eventually("it is accepted", lambda: api.client.post(path, json=probe).status_code == 201)
    bodies = [drawn(number, status=True) for number in range(OBJECTS)]
    chance = random.Random(SEED)
    play(empty_team, controller, bodies + [objects.large(chance, OBJECTS + i) for i in range(20)])


@pytest.fixture
def empty_team(api: Api) -> Team:
    return Team(api)
