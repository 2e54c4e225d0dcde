"""Warm pods: edited code, other programs and their end."""

import re
import statistics

import pytest

from e2e.sdk import Laptop, laptop, output_of, ray_image  # noqa: F401  fixtures
from e2e.space import until

pytestmark = pytest.mark.long
# Maximum seconds of a later call without imports; 2.8 s were measured on a busy machine.
WARM_SECONDS = 3.0


@pytest.mark.parametrize("delivery", ["shared", "direct"])
def test_a_later_call_runs_edited_code_in_the_same_pods(
    laptop: Laptop,  # noqa: F811
    delivery: str,
) -> None:
    laptop.deliver(delivery)
    train = laptop.directory / "train.py"
    train.write_text(STEP.format(word="before", number=0))
    (laptop.directory / "old.txt").touch()
    out = laptop.run(
        """
    from pathlib import Path
    import train

    remote = kt.fn(train.step).to(kt.Compute(idle_time=60)).distribute(workers=2)
    step = Path("train.py").read_text()
    print("FIRST", remote(1))
    Path("old.txt").unlink()
    for number in range(2, 7):
        Path("train.py").write_text(step.replace("before", "after").replace("0", str(number)))
        begun = time.time()
        print("LATER", remote(number), f"in {time.time() - begun:.2f} s")
        time.sleep(0.5)
    remote.down()
    """
    )
    assert "FIRST [['before', 0, 1, True], ['before', 0, 1, True]]" in out
    for number in range(2, 7):
        one = f"['after', {number}, {number}, False]"
        assert f"LATER [{one}, {one}]" in out
        # Each line of the log once, before the call returns.
        assert out.count(f"after {number} on") == 2
        assert out.rindex(f"after {number} on") < out.index(f"LATER [['after', {number},")
    seconds = [float(found) for found in re.findall(r"LATER .* in ([\d.]+) s", out)]
    print(f"{delivery}: later calls: {seconds}, median {statistics.median(seconds):.2f} s")
    assert statistics.median(seconds) <= WARM_SECONDS
    until(lambda: not laptop.jobs(), "remote.down")


STEP = """import os
def step(n):
    print("{word} {number} on", os.uname().nodename, flush=True)
    return ["{word}", {number}, n, os.path.exists("old.txt")]
"""

FAILS = """
    def work(how):
        import torch
        torch.distributed.init_process_group("nccl")
        if os.environ["RANK"] == "1":
            if how == "raise":
                raise ValueError("no such data")
            if how == "exit":
                os._exit(9)
        if how != "return":
            time.sleep(600)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return [total.item(), os.environ["MASTER_PORT"]]

    if __name__ == "__main__":
        remote = kt.fn(work).to(kt.Compute(idle_time=60)).distribute(workers=2)
        for how in ("return", "raise", "return", "exit", "return"):
            begun = time.time()
            try:
                print("RETURNED", remote(how))
            except kt.CallError as error:
                print("CAUGHT", type(error).__name__, error.rank)
            print(how, f"took {time.time() - begun:.2f} s")
"""


def test_pods_stay_after_a_failed_call(laptop: Laptop) -> None:  # noqa: F811
    out = laptop.run(FAILS)
    found = re.findall(r"RETURNED (.*)|CAUGHT (.*)", out)
    ports = [29500, 0, 29500 + 17 + 2, 0, 29500 + 17 + 4]
    assert [first or second for first, second in found] == [
        f"[[2.0, '{ports[0]}'], [2.0, '{ports[0]}']]",
        "RemoteException 1",
        f"[[2.0, '{ports[2]}'], [2.0, '{ports[2]}']]",
        "RankExited 1",
        f"[[2.0, '{ports[4]}'], [2.0, '{ports[4]}']]",
    ]
    assert len(laptop.jobs()) == 1


def test_waiting_pods_do_not_count_as_hanging(laptop: Laptop) -> None:  # noqa: F811
    laptop.edit_queue(reliability={"hangTimeoutSeconds": 10})
    out = laptop.run(
        """
    def f(how):
        print("BEGUN", how, flush=True)
        time.sleep(600 if how == "hangs" else 0)
        return [os.environ["TORCHRUN_ATTEMPT"], os.uname().nodename]

    if __name__ == "__main__":
        remote = kt.fn(f).to(kt.Compute(idle_time=60)).distribute(workers=2)
        first = remote("returns")
        time.sleep(25)
        print("SAME", remote("returns") == first, {attempt for attempt, _ in first})
        try:
            remote("hangs")
        except kt.CallError as error:
            print("CAUGHT", error)
    """
    )
    assert "SAME True {'0'}" in out
    assert re.search("CAUGHT .*Hung", out)


OTHERS = """
    def f(n):
        print("runs", n, flush=True)
        time.sleep(3)
        return [n, os.uname().nodename]

    if __name__ == "__main__":
        begun = time.time()
        print("RETURNED", kt.fn(f).to(kt.Compute(idle_time=60))(int(sys.argv[1])))
"""


def test_another_program_uses_the_warm_pods(laptop: Laptop) -> None:  # noqa: F811
    output_of(laptop.script(OTHERS, arguments=("1",)))
    assert "RETURNED [2, " in output_of(laptop.script(OTHERS, arguments=("2",)))
    assert len(laptop.jobs()) == 1
    # Of two concurrent calls, one creates its own pods.
    both = [laptop.script(OTHERS, arguments=(number,)) for number in ("3", "4")]
    for number, script in enumerate(both, 3):
        assert f"RETURNED [{number}, " in output_of(script)
    assert len(laptop.jobs()) == 2


def test_a_lost_pod_is_replaced_and_the_call_repeated(laptop: Laptop) -> None:  # noqa: F811
    script = laptop.script(
        """
    def waits(n):
        print("BEGUN", n, os.environ["TORCHRUN_ATTEMPT"], flush=True)
        time.sleep(8 * n)
        return [n, os.environ["TORCHRUN_ATTEMPT"], os.environ["RANK"]]

    if __name__ == "__main__":
        remote = kt.fn(waits).to(kt.Compute(idle_time=60)).distribute(workers=2)
        print("FIRST", remote(0))
        print("SECOND", remote(1))
    """
    )
    assert script.stdout is not None
    assert any("BEGUN 1 0" in line for line in iter(script.stdout.readline, ""))
    laptop.space.kubectl("delete", laptop.pods()[0], "--wait=false")
    assert "SECOND [[1, '1', '0'], [1, '1', '1']]" in output_of(script)


def test_idle_pods_end_by_themselves(laptop: Laptop) -> None:  # noqa: F811
    laptop.run(
        """
    def f():
        return 1

    if __name__ == "__main__":
        assert kt.fn(f).to(kt.Compute(idle_time=5))() == 1
    """
    )
    until(lambda: laptop.jobs()[0]["status"]["phase"] == "Succeeded", "the job's own end")


RAY = """import os, helper

def inner():
    return [helper.WORD, os.uname().nodename]

def outer(n):
    import ray
    ray.init(address="auto")
    if n == 3:
        raise ValueError("no such data")
    far = ray.remote(num_gpus=1)(inner)
    print("on the head", helper.WORD, flush=True)
    return [os.uname().nodename, ray.get(far.remote()), len(ray.nodes())]
"""


@pytest.mark.timeout(900, func_only=True)
def test_ray_stays_with_its_workers(laptop: Laptop, ray_image: str) -> None:  # noqa: F811
    laptop.image = ray_image
    (laptop.directory / "work.py").write_text(RAY)
    helper = laptop.directory / "helper.py"
    helper.write_text("WORD = 'before'\n")
    out = laptop.run(
        """
    from pathlib import Path
    import work

    remote = kt.fn(work.outer).to(kt.Compute(idle_time=15)).distribute(
        "ray", workers=1, worker_node_options={"gpus": 1}
    )
    for number in range(1, 6):
        begun = time.time()
        try:
            print("RETURNED", remote(number))
        except kt.RemoteException as error:
            print("CAUGHT", error.text)
        print(f"call {number} took {time.time() - begun:.2f} s")
        Path("helper.py").write_text(f"WORD = 'after {number}'\\n")
    """
    )
    found = re.findall(r"RETURNED \['(.*)', \['(.*)', '(.*)'\], (\d)\]|CAUGHT (.*)", out)
    assert [(word, nodes, error) for _, word, _, nodes, error in found] == [
        ("before", "2", ""),
        ("after 1", "2", ""),
        ("", "", "no such data"),
        ("after 3", "2", ""),
        ("after 4", "2", ""),
    ]
    # The same two pods serve all calls, and both end by themselves.
    places = {(head, worker) for head, _, worker, _, error in found if not error}
    assert len(places) == 1
    assert len(set(*places)) == 2
    assert out.count("on the head after 4") == 1
    until(lambda: laptop.jobs()[0]["status"]["phase"] == "Succeeded", "the job's own end", 120)
