"""Lowest versions of dependencies. `make lowest-versions` imports everything with them."""

import tomllib

import pytest

from lowest_versions import PROJECTS, ROOT, dependencies, lowest, modules


@pytest.mark.parametrize("project", PROJECTS)
def test_each_dependency_has_a_lowest_version(project: str) -> None:
    pinned = [lowest(each) for each in dependencies(project)]
    assert all("==" in each and ">=" not in each for each in pinned)


def test_extras_and_markers_stay() -> None:
    assert lowest("PyJWT[crypto]>=2.10") == "PyJWT[crypto]==2.10"
    assert (
        lowest("uvloop>=0.23; sys_platform != 'win32'") == "uvloop==0.23; sys_platform != 'win32'"
    )
    with pytest.raises(ValueError, match="six has no lowest version"):
        lowest("six")


def test_one_package_has_one_lowest_version() -> None:
    """The development environment has what the plugin runs on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    every = [*project["dependency-groups"]["dev"], *map(str, dependencies("pyproject.toml"))]
    declared = {each.partition(">=")[0]: each for each in every}
    for each in dependencies("plugin/pyproject.toml"):
        assert declared[each.partition(">=")[0]] == each


def test_all_modules_are_imported() -> None:
    assert {
        "torchrun_api.kinds.job",
        "torchrun_controller.app",
        "kubectl_torchrun.__main__",
    } <= set(modules())
