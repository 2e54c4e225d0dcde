"""The checks of conformance.py on the simulation; tests/integration/test_simulation.py has the rest."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import virtual_time
from faults.api_server import ApiServer
from faults.cluster import GarbageCollector, PodCollector
from faults.conformance import CHECKS
from faults.conformance_api import Api
from faults.faults import FaultPlan
from faults.job_controller import JobController
from faults.network import Client


@pytest.mark.parametrize("check", CHECKS)
def test_the_simulation_passes_the_checks(check: str) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()

        def now() -> datetime:
            return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=loop.time())

        server = ApiServer(now)
        GarbageCollector(server, now, "garbage-collector")
        JobController(server, now)
        PodCollector(server, now, "pod-garbage-collector")
        transport = Client("test", server, FaultPlan()).session("test")
        await CHECKS[check](Api(transport, "team"))

    virtual_time.run(run())
