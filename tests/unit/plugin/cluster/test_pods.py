"""Ranks and nodes of gangs, with and without a head of its own."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_torchrun.cluster.backoff import Retries
from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.http_client import HttpClient
from kubectl_torchrun.cluster.pods import Ranks, ranks_of
from kubectl_torchrun.cluster.slices import JobSlice
from torchrun_api.json import JsonObject

from ..api_server import ApiServer

PROCESSES = st.integers(1, 16)


@given(PROCESSES, st.none() | PROCESSES, st.integers(1, 20))
def test_ranks_are_mapped_to_nodes(each: int, head: int | None, nodes: int) -> None:
    ranks = Ranks(each, head)
    sizes = [head or each, *[each] * (nodes - 1)]
    layout = [node for node, size in enumerate(sizes) for _ in range(size)]
    assert [ranks.node_of(rank) for rank in range(len(layout))] == layout
    assert [ranks.first_of(node) for node in range(nodes)] == [
        layout.index(node) for node in range(nodes)
    ]


EIGHT = {"nodeResources": {"gpus": 8}}
# A head without GPUs, and four workers of 8.
HEAD = {"numNodes": 5, "head": {"nodeResources": {"gpus": 0}}}


@pytest.mark.parametrize(
    ("spec", "gpus", "queue", "ranks"),
    [
        ({"numNodes": 5}, 40, EIGHT, Ranks(8)),
        ({"numNodes": 5}, 0, {}, Ranks(1)),
        (HEAD, 32, EIGHT, Ranks(8, 1)),
        ({"numNodes": 5, "head": {}}, 40, EIGHT, Ranks(8, 8)),
        ({**HEAD, "distributed": {"nprocPerNode": 2}}, 32, EIGHT, Ranks(2)),
        (HEAD, 32, {**EIGHT, "distributed": {"nprocPerNode": 4}}, Ranks(4)),
    ],
)
async def test_ranks_of_each_node(
    server: ApiServer, spec: JsonObject, gpus: int, queue: JsonObject, ranks: Ranks
) -> None:
    server.put("torchrunqueues", "gpu", spec=queue)
    body = {"spec": {"jobQueue": "gpu", **spec}, "status": {"numNodes": 5, "gpus": gpus}}
    async with HttpClient(server.url) as client:
        assert (
            await ranks_of(Api(client, "ns", Retries()), msgspec.convert(body, JobSlice)) == ranks
        )
