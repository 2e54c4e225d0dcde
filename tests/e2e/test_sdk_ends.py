"""Other ends of calls: timeouts, evictions, and clients that reattach."""

import json
import re
import signal
import textwrap

import pytest

from e2e.sdk import SECONDS, Laptop, laptop, output_of  # noqa: F401  a fixture
from e2e.space import until

pytestmark = pytest.mark.long


def test_a_rank_that_does_not_start_is_reported(laptop: Laptop) -> None:  # noqa: F811
    # Before rank 1 imports anything.
    hangs = "import os, time\nif os.environ.get('RANK') == '1':\n    time.sleep(600)\n"
    (laptop.directory / "usercustomize.py").write_text(hangs)
    out = laptop.run(
        """
    def f():
        return 1

    if __name__ == "__main__":
        compute = kt.Compute(env={"PYTHONPATH": "/app"})
        remote = kt.fn(f).to(compute).distribute(workers=2, quorum_timeout=5)
        try:
            remote()
        except kt.QuorumTimeout as error:
            print("CAUGHT", error)
    """
    )
    assert re.search(r"CAUGHT Only 1 of 2 ranks of f-\w+ started within 5 s", out)
    until(lambda: not laptop.jobs(), "deleted")


def test_an_eviction_is_reported(laptop: Laptop) -> None:  # noqa: F811
    script = laptop.script(
        """
    def fills():
        print("BEGUN", flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        try:
            kt.fn(fills).to(kt.Compute()).distribute(workers=2)()
        except kt.Evicted as error:
            print("CAUGHT", error)
    """
    )
    assert script.stdout is not None
    assert any("BEGUN" in line for line in iter(script.stdout.readline, ""))
    # A message of the eviction manager. Kubelets of the local cluster do not measure local storage.
    message = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Mi". '
    status = {"status": {"phase": "Failed", "reason": "Evicted", "message": message}}
    words = ("patch", laptop.pods()[1], "--subresource=status", "--type=merge")
    laptop.space.kubectl(*words, "--patch", json.dumps(status))
    assert re.search(r"CAUGHT fills-\w+: Evicted: .*scratch.*exceeds", output_of(script))


SLOW = """
    def f():
        print("BEGUN", flush=True)
        time.sleep(8)
        return [os.environ["RANK"], "done"]

    if __name__ == "__main__":
        kt.fn(f).to(kt.Compute()).distribute(workers=2)()
"""


def test_a_client_reattaches_for_the_results(laptop: Laptop) -> None:  # noqa: F811
    script = laptop.script(SLOW)
    assert script.stdout is not None
    assert any("BEGUN" in line for line in iter(script.stdout.readline, ""))
    script.send_signal(signal.SIGINT)
    _, err = script.communicate(timeout=SECONDS)
    job = laptop.jobs()[0]["metadata"]["name"]
    assert f"kt results {job}" in err
    results = [["0", "done"], ["1", "done"]]
    # In Python while the job runs, and in a shell after its end.
    out = laptop.run(f"print('RESULTS', kt.attach({job!r}))")
    assert f"RESULTS {results}" in out
    laptop.space.wait_phase(job, "Succeeded")
    kt = ("python3", "-m", "torchrun_sdk.cli")
    assert json.loads(output_of(laptop.start(*kt, "results", job))) == results
    assert "BEGUN" in output_of(laptop.start(*kt, "logs", job))
    assert laptop.jobs()[0]["spec"]["reliability"]["ttlSecondsAfterFinished"] == 24 * 3600


def test_results_wait_in_the_pods_without_a_claim(laptop: Laptop) -> None:  # noqa: F811
    laptop.deliver("direct")
    script = laptop.script(SLOW)
    assert script.stdout is not None
    assert any("BEGUN" in line for line in iter(script.stdout.readline, ""))
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=SECONDS)
    job = laptop.jobs()[0]["metadata"]["name"]
    pods = laptop.pods()

    def returned() -> bool:
        find = ("find", "/app/.torchrun-sdk/results", "-name", "*.left")
        return all("left" in laptop.space.kubectl("exec", pod, "--", *find) for pod in pods)

    until(returned, "both ranks have returned")
    assert laptop.jobs()[0]["status"]["phase"] == "Running"
    out = laptop.run(f"print('RESULTS', kt.attach({job!r}))")
    assert "RESULTS [['0', 'done'], ['1', 'done']]" in out
    laptop.space.wait_phase(job, "Succeeded")
    # The results were collected, and are not stored elsewhere.
    kt = laptop.start("python3", "-m", "torchrun_sdk.cli", "results", job)
    _, err = kt.communicate(timeout=SECONDS)
    assert kt.returncode != 0
    assert f"{job} succeeded, but its results are not available" in err


@pytest.mark.parametrize("delivery", ["shared", "direct"])
def test_a_client_reattaches_to_a_later_call(laptop: Laptop, delivery: str) -> None:  # noqa: F811
    laptop.deliver(delivery)
    script = laptop.script(
        """
    def f(n):
        print("BEGUN", n, flush=True)
        time.sleep(6 * n)
        return [n, os.environ["RANK"]]

    if __name__ == "__main__":
        remote = kt.fn(f).to(kt.Compute(idle_time=20)).distribute(workers=2)
        print("FIRST", remote(0))
        remote(1)
    """
    )
    assert script.stdout is not None
    assert any("BEGUN 1" in line for line in iter(script.stdout.readline, ""))
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=SECONDS)
    (job,) = (job["metadata"]["name"] for job in laptop.jobs())
    assert "RESULTS [[1, '0'], [1, '1']]" in laptop.run(f"print('RESULTS', kt.attach({job!r}))")
    laptop.space.wait_phase(job, "Succeeded")


def test_a_cell_of_a_notebook_is_called(laptop: Laptop) -> None:  # noqa: F811
    session = """
    import os
    import torchrun_sdk as kt
    RATE = 0.5
    def half(n):
        return n * RATE

    def f(n):
        return [half(n), os.environ["RANK"]]

    print("RESULTS", kt.fn(f).to(kt.Compute()).distribute(workers=2)(3))
    exit
    """
    (laptop.directory / "session").write_text(textwrap.dedent(session).lstrip())
    ipython = "python3 -m IPython --simple-prompt --no-banner --quick < session"
    out = output_of(laptop.start("sh", "-c", ipython))
    assert "RESULTS [[1.5, '0'], [1.5, '1']]" in out
