"""One cluster with the installed controller, and a namespace for each test."""

import json
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest

from e2e import cluster as clusters
from e2e.cluster import Cluster
from e2e.evidence import gather
from e2e.manifests import queue
from e2e.nodes import HOSTNAME
from e2e.space import CONTROLLER, Space
from kubectl_torchrun.cluster.kubectl import Target, proxy
from torchrun_cluster import LocalCluster

HERE = Path(__file__).parent
SECONDS = 900
"""Timeout of a test without its fixtures, which may build images."""
LABEL = "torchrun-e2e"
PROFILE = "pod-security.kubernetes.io/enforce"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--cluster`, which uses an existing cluster."""
    parser.addoption("--cluster", default="", help="use the cluster of this name, and keep it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set timeouts for tests, but not for the first builds."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS, func_only=True))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `nodes`."""
    config.addinivalue_line("markers", "nodes(count): needs a local cluster with so many nodes")


def wanted_nodes(items: list[pytest.Item]) -> int:
    """As many as a test needs that is not skipped; two show what one hides, and cost seconds."""
    marks = (
        item.get_closest_marker("nodes") for item in items if not item.get_closest_marker("skip")
    )
    return max((mark.args[0] for mark in marks if mark), default=2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add objects and logs to the report of a failed test before its namespace is deleted."""
    report = yield
    space = getattr(item, "funcargs", {}).get("space")
    if report.failed and space is not None:
        report.sections.extend(gather(space))
    return report


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster with the controller running in it."""
    existing = request.config.getoption("--cluster")
    with clusters.start(existing, wanted_nodes(request.session.items)) as running:
        manifests = clusters.manifests(running, running.controller)
        running.kubectl("apply", "--server-side", "-f", "-", stdin=manifests)
        if existing:
            running.kubectl("rollout", "restart", *CONTROLLER)
        running.kubectl("rollout", "status", *CONTROLLER, "--timeout=180s")
        yield running
        if running.local is None:
            running.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=manifests)


@pytest.fixture
def local(cluster: Cluster, request: pytest.FixtureRequest) -> LocalCluster:
    """The local cluster, with as many nodes as the marker `nodes` asks for. Skips on others."""
    mark = request.node.get_closest_marker("nodes")
    count = mark.args[0] if mark else 1
    if cluster.local is None or cluster.nodes < count:
        pytest.skip(f"needs a local cluster: torchrun_cluster up --nodes {count}")
    return cluster.local


@pytest.fixture(scope="module")
def controller_on_the_first_node(cluster: Cluster) -> Iterator[None]:
    """No test disturbs the node of the API server, so the controller goes there, too."""

    def move(node: str | None) -> None:
        selector = {"spec": {"template": {"spec": {"nodeSelector": {HOSTNAME: node}}}}}
        cluster.kubectl("patch", *CONTROLLER, f"--patch={json.dumps(selector)}")
        cluster.kubectl("rollout", "status", *CONTROLLER, "--timeout=180s")

    if cluster.local is None:
        yield
        return
    move(cluster.local.nodes[0].name)
    yield
    move(None)


@pytest.fixture(scope="session")
def api(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """An HTTP client of the API server, through kubectl proxy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", cluster.environment["PATH"])
        with proxy(Target(kubeconfig=str(cluster.kubeconfig))) as socket:
            transport = httpx.HTTPTransport(uds=str(socket))
            with httpx.Client(
                transport=transport, base_url="http://localhost", timeout=180
            ) as client:
                yield client


@pytest.fixture(scope="session")
def _no_namespace_stays(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if cluster.local is not None and not request.config.getoption("--cluster"):
        return  # they are deleted with the cluster
    selector = ("namespace", "-l", f"{LABEL}=true")
    if cluster.kubectl("get", *selector, "-o", "name").stdout:
        cluster.kubectl("wait", *selector, "--for=delete", "--timeout=180s")


@pytest.fixture
def space(
    cluster: Cluster, api: httpx.Client, _no_namespace_stays: None, request: pytest.FixtureRequest
) -> Iterator[Space]:
    """A fresh namespace under the baseline Pod Security profile, with the queue `plain`.

    Jobs of that queue use the controller's image, with Python and without torch.
    """
    test = request.node.name.removeprefix("test_").replace("_", "-").split("[")[0]
    name = f"{test[:40].strip('-')}-{request.node.stash.setdefault(_NUMBER, next(_numbers))}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, f"{LABEL}=true", f"{PROFILE}=baseline")
    # Pods of the test are refused until the ServiceAccount exists.
    cluster.kubectl("wait", "-n", name, "serviceaccount/default", "--for=create", "--timeout=180s")
    space = Space(cluster, api, name)
    space.apply(queue("plain", cluster.controller))
    yield space
    cluster.kubectl("delete", "namespace", name, "--wait=false")


_NUMBER = pytest.StashKey[int]()
_numbers = iter(range(1, 10_000))
