"""The checks of the fault simulation, on the real API server and its controllers."""

from collections.abc import AsyncIterator, Iterator

import pytest

from faults.conformance import CHECKS
from faults.conformance_api import NODE, Api
from integration import controller_process
from integration.team import Team
from torchrun_cluster import LocalCluster
from torchrun_controller.client import ApiError, Connection, Transport


@pytest.fixture
async def transport(crds: LocalCluster) -> AsyncIterator[Transport]:
    connection = await Connection.load(str(crds.kubeconfig), None)
    async with connection.session("write") as session:
        yield session


@pytest.fixture(scope="module", autouse=True)
def _node(api: controller_process.Api) -> Iterator[None]:
    api.create("/api/v1/nodes", {"metadata": {"name": NODE}})
    yield
    api.delete(f"/api/v1/nodes/{NODE}")


@pytest.mark.parametrize("check", CHECKS)
async def test_the_real_api_server_passes_the_checks(
    transport: Transport, team: Team, check: str
) -> None:
    team.has(f"{team.core}/serviceaccounts/default")  # pods need it
    try:
        await CHECKS[check](Api(transport, team.name))
    except ApiError as error:
        if "WatchList" in error.message:  # disabled by default before 1.34
            pytest.skip("this API server streams no lists")
        raise
