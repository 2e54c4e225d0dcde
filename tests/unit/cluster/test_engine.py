"""The order in which a cluster is chosen."""

from __future__ import annotations

import itertools

import pytest

from torchrun_cluster.engine import Engine, Machine, choose
from torchrun_cluster.errors import ClusterError


def machine(
    asked_for: str = "",
    *,
    in_ci: bool = False,
    docker: bool = False,
    kubeconfig: bool = False,
    root: bool = False,
) -> Machine:
    return Machine(asked_for, in_ci, docker, kubeconfig, root)


@pytest.mark.parametrize(
    ("given", "engine"),
    [
        (machine("current", docker=True), Engine.CURRENT),
        (machine("local", docker=True), Engine.LOCAL),
        (machine("kind"), Engine.KIND),
        (machine(docker=True, kubeconfig=True, root=True), Engine.KIND),
        (machine(docker=True, in_ci=True), Engine.KIND),
        (machine(in_ci=True, kubeconfig=True), Engine.LOCAL),
        (machine(root=True), Engine.LOCAL),
    ],
)
def test_choice(given: Machine, engine: Engine) -> None:
    assert choose(given) is engine


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (machine(root=True, kubeconfig=True), "CLUSTER=current"),
        (machine(kubeconfig=True), "CLUSTER=local"),
        (machine(), "as root"),
        (machine("minikube"), "current, kind or local"),
    ],
)
def test_when_the_user_has_to_choose(given: Machine, advice: str) -> None:
    with pytest.raises(ClusterError, match=advice):
        choose(given)


def test_the_machine_is_changed_only_in_ci_or_for_root() -> None:
    for in_ci, docker, kubeconfig, root in itertools.product([False, True], repeat=4):
        given = machine(in_ci=in_ci, docker=docker, kubeconfig=kubeconfig, root=root)
        try:
            engine = choose(given)
        except ClusterError:
            continue
        if engine is Engine.LOCAL:
            assert not docker
            assert in_ci or (root and not kubeconfig)
