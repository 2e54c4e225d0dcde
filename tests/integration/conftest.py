"""One real control plane for all integration tests that do not break it."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from integration.audit import AuditLog
from integration.controller_process import NO_ELECTION, Api, ControllerProcess, install_crds
from integration.evidence import gather
from integration.team import Team
from torchrun_cluster import LocalCluster, Size


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add objects and logs to the report of a failed test before its control plane stops."""
    report = yield
    if report.failed:
        report.sections.extend(gather(getattr(item, "funcargs", {})))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """API server, etcd and controller-manager without nodes, so pods stay Pending."""
    with LocalCluster(name=f"test-{os.getpid()}", size=Size.CONTROL_PLANE) as running:
        yield running


@pytest.fixture(scope="module")
def crds(cluster: LocalCluster) -> LocalCluster:
    """The control plane of the module, with our CRDs."""
    install_crds(cluster)
    return cluster


@pytest.fixture(scope="module")
def api(crds: LocalCluster) -> Iterator[Api]:
    """An HTTP client of the API server."""
    client = Api(crds)
    yield client
    client.close()


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> AuditLog:
    """The audit log of a module whose control plane starts with its flags."""
    return AuditLog(tmp_path_factory.mktemp("audit"))


@pytest.fixture
def team(api: Api) -> Team:
    """A namespace for the test, with the queue `research`."""
    team_of_test = Team(api)
    team_of_test.make_queue()
    return team_of_test


@pytest.fixture
def controller(crds: LocalCluster, tmp_path: Path) -> Iterator[ControllerProcess]:
    """A controller of all namespaces, for modules with their own control plane."""
    with ControllerProcess(crds, tmp_path, *NO_ELECTION).running() as process:
        yield process


@pytest.fixture
def team_controller(crds: LocalCluster, team: Team, tmp_path: Path) -> Iterator[ControllerProcess]:
    """A controller of the team's namespace only."""
    only = ("--namespace", team.name)
    with ControllerProcess(crds, tmp_path, *NO_ELECTION, *only).running() as process:
        yield process
