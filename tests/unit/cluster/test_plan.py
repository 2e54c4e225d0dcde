"""What `make demo` says before it builds anything."""

from pathlib import Path

import pytest

from torchrun_cluster import plan
from torchrun_cluster.errors import ClusterError

DOCKER = """\
#!/bin/sh
[ "$1" = version ] && echo 29.1.0
exit 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, with an empty cache below it and enough free disk."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "_free_gigabytes", lambda: plan.GIGABYTES)
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def lines(**environment: str) -> list[str]:
    return plan.plan(environment).lines()


def with_tools(folder: Path) -> None:
    program(folder, "docker", DOCKER)
    program(folder, "kind", "#!/bin/sh\necho kind v0.33.0\n")
    program(folder, "kubectl", "#!/bin/sh\necho Client Version: v1.99.0\n")


def test_a_user_with_docker_needs_no_go(folder: Path) -> None:
    with_tools(folder)
    shown = lines(CLUSTER="kind")
    assert shown[0].endswith("pulls kindest/node from its registry, about 3 min")
    assert f"  kind       {folder / 'kind'}" in shown
    assert f"  kubectl    {folder / 'kubectl'}" in shown
    assert shown[-1] == "  in all     about 12 min on two cores"


def test_the_node_image_of_the_setting_is_named(folder: Path) -> None:
    with_tools(folder)
    shown = lines(CLUSTER="kind", KIND_IMAGE="registry.example/node:1")
    assert shown[0].endswith("with the node image registry.example/node:1")


def test_all_that_is_missing_is_named_at_once(folder: Path) -> None:
    found = plan.plan({"CLUSTER": "kind"})
    docker, kind, kubectl = found.missing
    assert "Docker engine" in docker
    assert "there is no kind of version 0.29 or later" in kind
    assert "there is no kubectl" in kubectl
    shown = found.lines()
    assert [line for line in shown if line.startswith("missing: ")] == shown[-3:]


def test_too_little_disk_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tools(folder)
    monkeypatch.setattr(plan, "_free_gigabytes", lambda: 3)
    assert plan.plan({"CLUSTER": "kind"}).missing == [
        f"{plan.GIGABYTES} GB of free disk for {folder / 'cache'}: it has 3 GB"
    ]


def test_an_image_of_an_earlier_run_takes_no_time(folder: Path) -> None:
    with_tools(folder)
    kept = folder / "cache" / "images" / "torchrun-torch-latest-0123" / "image.tar"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert lines(CLUSTER="kind")[-1] == "  in all     about 7 min on two cores"


def test_a_cluster_of_the_user_needs_two_images(folder: Path) -> None:
    assert plan.plan({"CLUSTER": "current", "TRAINER_IMAGE": "a"}).missing == [
        "CONTROLLER_IMAGE: an image that your nodes can pull"
    ]


def test_something_missing_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "kind")
    with pytest.raises(ClusterError, match="nothing was built"):
        plan.say_plan()
    with_tools(folder)
    assert plan.say_plan() == 0
