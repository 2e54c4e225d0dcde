"""The code blocks of the users' page on distributed training from Python.

Only import lines are changed, and the documented settings for machines without GPUs are set.
"""

import re
import textwrap
from pathlib import Path

import pytest

from e2e.sdk import Laptop, laptop, output_of, ray_image  # noqa: F401  fixtures

PAGE = Path(__file__).parent / "sdk_page.txt"
IMPORTS = {
    "import kubetorch as kt": "import torchrun_sdk as kt",
    "from kubetorch.distributed import pod_ips": "from torchrun_sdk.distributed import pod_ips",
    # Only the pods have Ray, not the client.
    "import ray": "",
}


def block(heading: str) -> str:
    """The Python block below a heading, with our imports."""
    _, _, rest = PAGE.read_text().partition(f"{heading}\n")
    found = re.search(r"```python\n(.*?)```", rest, re.DOTALL)
    assert found, heading
    lines = [IMPORTS.get(line.strip(), line) for line in found[1].splitlines()]
    return "\n".join(lines)


def write(where: Laptop, text: str, *, kt: bool = False) -> None:
    header = "import torchrun_sdk as kt\n" if kt else ""
    (where.directory / "my_script.py").write_text(header + text)


def test_basic_usage(laptop: Laptop) -> None:  # noqa: F811
    write(laptop, block("### Basic Usage") + "\nprint('RESULTS', sorted(results))\n")
    out = output_of(laptop.start("python3", "my_script.py"))
    results = re.search(r"RESULTS (.*)", out)[1]
    assert re.findall(r"Rank (\d)/4 initialized on \S+", results) == ["0", "1", "2", "3"]


def test_custom_launch_command(laptop: Laptop) -> None:  # noqa: F811
    write(laptop, block("### Custom Launch Command"), kt=True)
    # One write for each line, because 32 processes share a log.
    said_by_rank = "import os, sys\nsys.stdout.write('APP ' + os.environ['RANK'] + chr(10))\n"
    (laptop.directory / "train.py").write_text(said_by_rank)
    out = output_of(
        laptop.start("python3", "-m", "torchrun_sdk.cli", "run", "python", "my_script.py")
    )
    assert {int(rank) for rank in re.findall(r"APP (\d+)", out)} == set(range(32))


@pytest.mark.long  # builds an image with Ray
@pytest.mark.timeout(900, func_only=True)
def test_ray_clusters(laptop: Laptop, ray_image: str) -> None:  # noqa: F811
    laptop.image = ray_image
    text = block("### Usage").replace("def run_ray_job():", "def run_ray_job():\n    import ray")
    write(laptop, text + "\nprint('RESULTS', len(result), result[99])\n")
    out = output_of(laptop.start("python3", "my_script.py"))
    assert "RESULTS 100 Task 99 on GPU" in out


def test_peer_discovery(laptop: Laptop) -> None:  # noqa: F811
    body = textwrap.indent(block("## Peer Discovery Utility"), "    ")
    text = f"def peers():\n{body}\n    return ips\n"
    text += "print('RESULTS', kt.fn(peers).to(kt.Compute()).distribute(workers=4)()[0])\n"
    write(laptop, text, kt=True)
    out = output_of(laptop.start("python3", "my_script.py"))
    assert len(re.findall(r"10\.244\.\d+\.\d+", out.partition("RESULTS")[2])) == 4


def test_decorators(laptop: Laptop) -> None:  # noqa: F811
    write(laptop, block("## The `@distribute` Decorator"), kt=True)
    names = output_of(laptop.start("python3", "-m", "torchrun_sdk.cli", "deploy", "my_script.py"))
    (name,) = names.split()
    laptop.space.wait_phase(name, "Succeeded")


def test_shared_storage(laptop: Laptop) -> None:  # noqa: F811
    write(laptop, block("## Shared Storage for Distributed Training"), kt=True)
    output_of(laptop.start("python3", "my_script.py"))
