"""The checks of the fault simulation, on the real API server and its controllers."""

from collections.abc import AsyncIterator

import pytest

from faults.conformance import CHECKS
from faults.conformance_api import Api
from integration.team import Team
from torchrun_cluster import LocalCluster
from torchrun_controller.client import ApiError, Connection, Transport


@pytest.fixture
async def transport(crds: LocalCluster) -> AsyncIterator[Transport]:
    connection = await Connection.load(str(crds.kubeconfig), None)
    async with connection.session("write") as session:
        yield session


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
