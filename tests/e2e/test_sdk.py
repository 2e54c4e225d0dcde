"""Functions called from Python: real pods, real torch, real Ray."""

import json
import re
import textwrap

import pytest

from e2e.sdk import HEAD, Laptop, laptop, output_of, ray_image  # noqa: F401  fixtures
from e2e.space import until

DDP = """
    def train_fn(lr, steps=1):
        import torch

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group(backend="nccl")
        total = torch.tensor([float(rank)])
        torch.distributed.all_reduce(total)
        print(f"rank {rank} of {world} has lr {lr}", flush=True)
        return {"rank": rank, "world": world, "total": total.item(), "lr": lr}

    compute = kt.Compute(gpus=8, memory="512Gi", image=kt.images.pytorch("24.08-py3"))
    remote_train = kt.fn(train_fn).to(compute).distribute(framework="pytorch", workers=2)
    results = remote_train(0.5)
    import json
    print("RESULTS", json.dumps(results))
"""


def test_results_of_all_ranks(laptop: Laptop) -> None:  # noqa: F811
    lines = laptop.run(DDP).splitlines()
    last = next(line for line in lines if line.startswith("RESULTS"))
    assert json.loads(last.removeprefix("RESULTS")) == [
        {"rank": rank, "world": 2, "total": 1.0, "lr": 0.5} for rank in (0, 1)
    ]
    # Printed by the ranks before the call returned.
    heard = [number for number, line in enumerate(lines) if "has lr 0.5" in line]
    assert len(heard) == 2
    assert max(heard) < lines.index(last)
    # The call in the script does not run again in the pods. Results arrive before the end of the
    # job.
    until(lambda: laptop.jobs()[0]["status"]["phase"] == "Succeeded", "the job's own end")
    assert len(laptop.jobs()) == 1


CATCH = """
    remote = kt.fn(fails).to(kt.Compute()).distribute(workers=2)
    if __name__ == "__main__":
        try:
            remote()
        except kt.CallError as error:
            print("CAUGHT", type(error).__name__, error.rank, getattr(error, "exit_code", ""))
            print(error, "at", time.time())
"""


@pytest.mark.long
def test_an_exception_is_raised_in_the_client(laptop: Laptop) -> None:  # noqa: F811
    out = laptop.run(
        """
    def fails():
        if os.environ["RANK"] == "1":
            raise ValueError("no such data")
        time.sleep(600)
    """
        + CATCH
    )
    assert "CAUGHT RemoteException 1" in out
    assert "ValueError: no such data (rank 1 on " in out
    assert 'raise ValueError("no such data")' in out


@pytest.mark.long
def test_an_exited_rank_is_reported_within_30_s(laptop: Laptop) -> None:  # noqa: F811
    out = laptop.run(
        """
    def fails():
        if os.environ["RANK"] == "1":
            print("EXITS", time.time(), flush=True)
            os._exit(9)
        time.sleep(600)
    """
        + CATCH
    )
    assert "CAUGHT RankExited 1 9" in out
    left = float(re.search(r"EXITS ([\d.]+)", out)[1])
    reported = float(re.search(r" at ([\d.]+)", out)[1])
    print(f"reported after {reported - left:.1f} s")
    assert reported - left < 30


@pytest.mark.long
def test_out_of_memory_is_reported_to_the_client(laptop: Laptop) -> None:  # noqa: F811
    out = laptop.run(
        """
    def fails():
        if os.environ["RANK"] == "1":
            return len(bytearray(3 << 30))
        time.sleep(600)
    """
        + CATCH
    )
    assert "CAUGHT OutOfMemory" in out


@pytest.mark.long
def test_timeouts_end_the_job(laptop: Laptop) -> None:  # noqa: F811
    out = laptop.run(
        """
    def sleeps():
        time.sleep(600)

    if __name__ == "__main__":
        slow = kt.fn(sleeps).to(kt.Compute()).options(timeout=3)
        nowhere = kt.fn(sleeps).to(kt.Compute(launch_timeout=5, image="localhost/none:1"))
        os.environ.pop("TORCHRUN_SDK_IMAGE")
        for remote in (slow, nowhere):
            try:
                remote()
            except TimeoutError as error:
                print("CAUGHT", type(error).__name__, error)
    """
    )
    assert "CAUGHT CallTimeout" in out
    assert "CAUGHT LaunchTimeout" in out
    until(lambda: not laptop.jobs(), "deleted")


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_a_call_is_repeated_after_an_eviction(laptop: Laptop, index: int) -> None:  # noqa: F811
    script = laptop.script(
        """
    def waits():
        import torch
        torch.distributed.init_process_group("gloo")
        print("BEGUN", os.environ["TORCHRUN_ATTEMPT"], flush=True)
        time.sleep(8)
        return [os.environ["TORCHRUN_ATTEMPT"], os.environ["RANK"]]

    if __name__ == "__main__":
        print("RESULTS", kt.fn(waits).to(kt.Compute()).distribute(workers=2)())
    """
    )
    assert script.stdout is not None
    assert any("BEGUN 0" in line for line in iter(script.stdout.readline, ""))
    pod = next(pod for pod in laptop.pods() if re.search(rf"-{index}-\w{{5}}$", pod))
    laptop.space.kubectl("delete", pod, "--wait=false")
    assert "RESULTS [['1', '0'], ['1', '1']]" in output_of(script)


@pytest.mark.long
def test_two_concurrent_calls(laptop: Laptop) -> None:  # noqa: F811
    text = """
    import asyncio

    def f(n):
        time.sleep(3)
        return n

    async def both():
        remote = kt.fn(f).to(kt.Compute())
        return await asyncio.gather(remote.acall(1), remote.acall(2))

    if __name__ == "__main__":
        print("RESULTS", asyncio.run(both()))
    """
    first, second = laptop.script(text), laptop.script(text)
    for script in (first, second):
        assert "RESULTS [1, 2]" in output_of(script)
    assert len(laptop.jobs()) == 4


@pytest.mark.long
def test_the_addresses_of_the_pods(laptop: Laptop) -> None:  # noqa: F811
    out = laptop.run(
        """
    from torchrun_sdk.distributed import pod_ips

    def addresses():
        met = pod_ips(quorum_workers=2, quorum_timeout=60)
        try:
            pod_ips(quorum_workers=3, quorum_timeout=1)
        except kt.QuorumTimeout as error:
            return [met, str(error)]

    if __name__ == "__main__":
        print("RESULTS", kt.fn(addresses).to(kt.Compute(idle_time=30)).distribute(workers=2)())
        print("OUTSIDE", pod_ips(quorum_workers=2))
    """
    )
    outside = re.search(r"OUTSIDE (\[.*\])", out)[1]
    assert out.count(f"[{outside}, 'Only 2 of 3 workers have an address after 1 s.']") == 2
    assert outside.count("10.244.") == 2, "of pods on either node"


@pytest.mark.long
def test_apps_and_several_functions_of_a_file(laptop: Laptop) -> None:  # noqa: F811
    (laptop.directory / "app.py").write_text(
        HEAD
        + textwrap.dedent("""
    app = kt.app(
        name="ddp", cli_command="torchrun --nnodes=2 --nproc_per_node=1 say.py", replicas=2
    )

    @kt.compute(gpus=8)
    @kt.distribute(framework="pytorch", workers=2)
    def train():
        print("trains", flush=True)

    @kt.compute()
    def evaluate():
        print("evaluates", flush=True)
    """)
    )
    (laptop.directory / "say.py").write_text(
        "import os\nprint('APP', os.environ['RANK'], flush=True)\n"
    )
    out = output_of(laptop.start("python3", "-m", "torchrun_sdk.cli", "run", "python3", "app.py"))
    assert {"APP 0", "APP 1"} <= set(re.findall(r"APP \d", out))
    names = output_of(laptop.start("python3", "-m", "torchrun_sdk.cli", "deploy", "app.py")).split()
    assert [name.rpartition("-")[0] for name in names] == ["ddp", "train", "evaluate"]
    for name in names:
        laptop.space.wait_phase(name, "Succeeded")
    listed = output_of(laptop.start("python3", "-m", "torchrun_sdk.cli", "list"))
    assert all(name in listed for name in names)
    output_of(laptop.start("python3", "-m", "torchrun_sdk.cli", "down", *names))
    assert len(laptop.jobs()) == 1


@pytest.mark.long
def test_a_volume_is_created_and_shared(laptop: Laptop) -> None:  # noqa: F811
    out = laptop.run(
        """
    from pathlib import Path

    def shares():
        import torch
        torch.distributed.init_process_group("gloo")
        Path("/data", os.environ["RANK"]).write_text("here")
        torch.distributed.barrier()
        return sorted(os.listdir("/data"))

    if __name__ == "__main__":
        volume = kt.Volume("shared-data", "/data", size="10Mi", storage_class="local-path")
        print("RESULTS", kt.fn(shares).to(kt.Compute(volumes=[volume])).distribute(workers=2)())
    """
    )
    assert "RESULTS [['0', '1'], ['0', '1']]" in out
    assert "shared-data" in laptop.space.kubectl("get", "pvc", "-o", "name")


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_ray(laptop: Laptop, ray_image: str) -> None:  # noqa: F811
    laptop.image = ray_image
    out = laptop.run(
        """
    def named(i):
        return f"Task {i} on GPU"

    def run_ray_job():
        import ray
        ray.init(address="auto")

        @ray.remote(num_gpus=1)
        def gpu_task(i):
            return named(i)

        return ray.get([gpu_task.remote(i) for i in range(100)])

    compute = kt.Compute(cpus="4", memory="16Gi", image=kt.images.Ray("2.32.0-py311"))
    remote_ray = kt.fn(run_ray_job).to(compute).distribute(
        framework="ray", workers=1, worker_node_options={"gpus": 1, "cpus": "4", "memory": "16Gi"}
    )
    result = remote_ray()
    print("RESULTS", len(result), result[99])
    """
    )
    assert "RESULTS 100 Task 99 on GPU" in out
    assert [job["status"]["phase"] for job in laptop.jobs()] == ["Succeeded"]


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_head_and_workers_of_ray_have_separate_pods(laptop: Laptop, ray_image: str) -> None:  # noqa: F811
    laptop.image = ray_image
    out = laptop.run(
        """
    os.environ["TORCHRUN_SDK_CPU_ONLY"] = "0"  # Ray checks the resources

    def roles():
        import ray
        from torchrun_sdk.distributed import pod_ips

        ray.init(address="auto")

        @ray.remote(num_cpus=0.1, scheduling_strategy="SPREAD")
        def node_id():
            time.sleep(1)
            return os.environ["TORCHRUN_ROLE"] + os.environ["NODE_RANK"]

        seen = set()
        while len(seen) < 3:
            seen |= set(ray.get([node_id.remote() for _ in range(12)]))
        return [sorted(seen), len(pod_ips()), os.environ["TORCHRUN_ROLE"]]

    compute = kt.Compute(cpus="100m", memory="1400Mi", image=kt.images.Ray("2.32.0-py311"))
    options = {"cpus": "50m", "memory": "1100Mi"}
    if __name__ == "__main__":
        remote = kt.fn(roles).to(compute)
        print("RESULTS", remote.distribute("ray", workers=2, worker_node_options=options)())
    """
    )
    assert "RESULTS [['head0', 'worker1', 'worker2'], 3, 'head']" in out
    selector = "app.kubernetes.io/component=worker"
    pods = json.loads(laptop.space.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
    asked = {
        (
            pod["metadata"]["labels"]["torchrun.ai/role"],
            *sorted(pod["spec"]["containers"][0]["resources"]["requests"].items()),
        )
        for pod in pods
    }
    assert len(pods) == 3
    assert asked == {
        ("head", ("cpu", "100m"), ("memory", "1400Mi")),
        ("worker", ("cpu", "50m"), ("memory", "1100Mi")),
    }
    (job,) = laptop.jobs()
    name, status = job["metadata"]["name"], job["status"]
    assert (status["phase"], status["numNodes"]) == ("Succeeded", 3)
    made = laptop.space.kubectl("get", "jobs", "-o", "name").split()
    assert made == [f"job.batch/{name}", f"job.batch/{name}-w"]
