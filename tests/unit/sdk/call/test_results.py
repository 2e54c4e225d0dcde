"""Results of real ranks as values of the client."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchrun_sdk as kt

from ..pods import SECONDS

pytestmark = pytest.mark.long  # processes

SCRIPT = """
import torchrun_sdk as kt

class Metrics:
    class Loss(float): ...

    def __init__(self, loss): self.loss = self.Loss(loss)

class Diverged(Exception): ...

def train(loss):
    if loss > 1:
        raise Diverged(loss)
    return Metrics(loss)

if __name__ == "__main__":
    remote = kt.fn(train).to(kt.Compute()).options(serialization="pickle", stream_logs=False)
    metrics = remote(0.5)
    assert type(metrics) is Metrics and type(metrics.loss) is Metrics.Loss, metrics
    print(metrics.loss)
    try:
        remote(2)
    except kt.RemoteException as error:
        print(error.type)
    print(remote.deploy(0.5))
"""


def test_classes_of_a_script_are_found_on_the_client(cluster: Path, tmp_path: Path) -> None:
    (cluster / "state").mkdir()
    script = tmp_path / "project" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    sdk = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "sdk")}
    command = [sys.executable, str(script)]
    run = subprocess.run(command, env=sdk, text=True, capture_output=True, timeout=5 * SECONDS)
    assert run.returncode == 0, run.stderr
    loss, kind, job = run.stdout.splitlines()
    assert (loss, kind) == ("0.5", "__main__.Diverged")
    # Another program does not have the class.
    assert job == json.loads((cluster / "job.json").read_text())["metadata"]["name"]
    with pytest.raises(kt.ProtocolError, match="Define Metrics in a module that both import"):
        kt.attach(job)
