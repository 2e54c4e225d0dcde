"""What etcd stores for the Job of a gang: about half of it says which fields the controller owns."""

import os

import msgspec

from torchrun_api.kinds.resources import JOBS
from torchrun_bench.etcd import Etcd
from torchrun_cluster import LocalCluster
from torchrun_controller.client import Connection
from torchrun_controller.client.apply import Applier
from torchrun_controller.reconcile import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from world import ZIP, World, make_job, make_queue

DEFAULTS = Defaults(
    runtime_image="registry.example.com/torchrun-controller:0.0.0",
    progress_url="http://torchrun-controller.torchrun-system.svc:8081",
)
UID = "1f0d8a8e-1111-4222-8333-000000000001"
MOST = 8000  # bytes. Each environment variable takes about 120, in every pod as well.


class Leading:
    def check(self) -> None:
        pass


def child_job() -> Apply:
    """The Job of two nodes with a workspace and reports, in the namespace default."""
    queue = make_queue(nodeResources={"cpus": 1, "memory": "1Gi"})
    world = World(make_job(numNodes=2, volumes=ZIP), queue)
    world.defaults = DEFAULTS
    world.settle()
    world.takes_upload()
    world.settle()
    world.sync_done()
    world.settle()
    (job,) = (apply for plan in world.plans for apply in plan.applies if apply.kind is JOBS)
    text = msgspec.json.encode(job.body).replace(b"uid-train", UID.encode())
    body = msgspec.json.decode(text.replace(b'"namespace":"ml"', b'"namespace":"default"'))
    return Apply(JOBS, body)


async def test_the_job_of_a_gang_is_small(cluster: LocalCluster) -> None:
    job = child_job()
    connection = await Connection.load(str(cluster.kubeconfig), None)
    async with connection.session("write") as transport:
        await Applier(transport, Leading()).apply(job)
    etcd = Etcd(f"test-{os.getpid()}")
    (stored,) = etcd.under("/registry/jobs/default/train").values()
    etcd.close()
    sizes = f"{len(msgspec.json.encode(job.body))} bytes sent, {len(stored)} stored"
    print(sizes)
    assert len(stored) < MOST, sizes
