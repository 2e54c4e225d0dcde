"""The main example: a directory and a command on two nodes, and a second run from the checkpoint."""

import re
from collections import defaultdict

import yaml

from e2e.cluster import ROOT
from e2e.history import History
from e2e.nodes import apart
from e2e.space import Space
from torchrun_api import names
from torchrun_api.kinds.resources import CLAIMS, PODS, TORCHRUN_JOBS

GPT = ROOT / "examples" / "gpt"
LOSS = re.compile(r"\[rank (\d+)\] step (\d+)/\d+ loss (\d+\.\d+)")
LIFE = ["Pending", "Syncing", "Queued", "Running", "Succeeded"]


def gpt_queue(space: Space) -> dict:
    queue = yaml.safe_load((GPT / "queue.yaml").read_text())
    queue["spec"]["image"] = space.cluster.trainer
    if space.cluster.nodes > 1:
        queue["spec"]["podTemplate"] = apart()
    return queue


def losses(output: str) -> dict[int, list[float]]:
    """The losses that each rank printed, in order."""
    found = defaultdict(list)
    for rank, _, loss in LOSS.findall(output):
        found[int(rank)].append(float(loss))
    return found


def worker_nodes(pods: History) -> set[str]:
    """The nodes on which workers ever ran."""
    return {
        pod["spec"]["nodeName"]
        for pod in pods.states()
        if pod["metadata"]["labels"].get(names.COMPONENT_LABEL) == names.WORKER
        and "nodeName" in pod["spec"]
    }


def test_two_nodes_train_and_a_second_run_resumes(space: Space):
    space.apply(gpt_queue(space))
    options = ("--queue", "cpu", "--nodes", "2", "--name", "gpt")
    with space.histories(TORCHRUN_JOBS, CLAIMS, PODS) as (jobs, claims, pods):
        command = "python train.py --steps 20 --log-every 5 --checkpoint-every 10 --sample 0"
        run = space.submit(GPT, command, *options)
        assert run.returncode == 0
        phases = jobs.phases("gpt", "Succeeded")
        assert len(worker_nodes(pods)) == min(2, space.cluster.nodes)

        by_rank = losses(run.stdout)
        assert set(by_rank) == {0, 1}
        assert by_rank[0] == by_rank[1]
        assert len(by_rank[0]) == 5
        assert by_rank[0][-1] < by_rank[0][0] - 0.3
        # A job that lacks nothing leaves Pending at once.
        assert phases in (LIFE, LIFE[1:])
        described = space.kubectl("describe", "torchrunjob", "gpt")
        for word in ("WorkspaceReady", "Complete", "Scheduled", "Events:", "Running"):
            assert word in described

        space.kubectl("delete", "torchrunjob", "gpt")
        space.wait("pvc/gpt-workspace", "delete")
        kept = space.get(CLAIMS, "gpt-checkpoints")
        assert kept["metadata"]["labels"]["torchrun.ai/retained-from"] == "gpt"
        assert "deletionTimestamp" not in kept["metadata"]

        space.wait("service/gpt", "delete")
        space.wait("job/gpt", "delete")
        again = space.submit(GPT, command.replace("--steps 20", "--steps 30"), *options)
        assert again.returncode == 0
        assert "resumed after step 20/30" in again.stdout
        assert claims.uids()["gpt-checkpoints"] == {kept["metadata"]["uid"]}
        assert len(claims.uids()["gpt-workspace"]) == 2
