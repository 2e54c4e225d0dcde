"""Which ranks are on which node of a gang."""

from typing import NamedTuple

from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.slices import QUEUES, Job, QueueSpecSlice


class Ranks(NamedTuple):
    """Processes of each node; those of node 0 are `head`, if it has a separate Job."""

    each: int = 1
    head: int | None = None

    def node_of(self, rank: int) -> int:
        """The node on which a rank is."""
        first = self.first_of(1)
        return 0 if rank < first else 1 + (rank - first) // self.each

    def first_of(self, node: int) -> int:
        """The lowest rank of a node."""
        if node == 0:
            return 0
        return (self.each if self.head is None else self.head) + (node - 1) * self.each


async def ranks_of(api: Api, job: Job) -> Ranks:
    """Processes of each node: set by the job or the queue, else its number of GPUs, else one."""
    nproc = job.spec.distributed.nproc_per_node
    if isinstance(nproc, int):
        return Ranks(max(nproc, 1))
    try:
        queue = (await api.get(QUEUES, job.spec.job_queue)).spec
    except ApiError:  # it may be deleted or forbidden
        queue = QueueSpecSlice()
    nproc = queue.distributed.nproc_per_node
    if isinstance(nproc, int):
        return Ranks(max(nproc, 1))
    gpus, nodes = job.status.gpus or 0, job.status.num_nodes or 1
    if job.spec.head is None:
        return Ranks(max(gpus // nodes, 1))
    own = job.spec.head.node_resources.gpus
    of_head = queue.node_resources.gpus if own is None else own
    return Ranks(max((gpus - of_head) // max(nodes - 1, 1), 1), max(of_head, 1))
