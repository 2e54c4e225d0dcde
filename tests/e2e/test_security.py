"""Pods are admitted under the enforced Pod Security profile. See also `space` in conftest."""

from e2e.conftest import PROFILE
from e2e.manifests import zip_job
from e2e.space import Space
from e2e.test_run import GPT, gpt_queue, losses
from torchrun_api.kinds.resources import PODS


def test_restricted(space: Space):
    """The torch image trains as a user that it does not know, and saves checkpoints."""
    space.kubectl("label", "namespace", space.name, "--overwrite", f"{PROFILE}=restricted")
    strict = gpt_queue(space)
    strict["spec"]["podSecurity"] = "restricted"
    space.apply(strict, zip_job("waits", "cpu", "true"))
    space.wait_reason("waits", "WaitingForUpload")
    assert space.get(PODS, "waits-sync-0")["spec"]["automountServiceAccountToken"] is False
    command = "python train.py --steps 4 --log-every 2 --checkpoint-every 2 --sample 0"
    run = space.submit(GPT, command, "--queue", "cpu", "--nodes", "2", "--name", "gpt")
    assert run.returncode == 0
    assert set(losses(run.stdout)) == {0, 1}
    space.wait_phase("gpt", "Succeeded")
