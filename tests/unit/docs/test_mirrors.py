"""From a source file to its tests: `make test-of`."""

from pathlib import Path

import pytest

from mirrors import MIRRORS, ROOT, NoTestsError, are_own, find_tests, main, mirror_of

CONTROLLER = "controller/torchrun_controller"


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        (f"{CONTROLLER}/watch/codec.py", ["watch/test_codec.py"]),
        (f"{CONTROLLER}/signals.py", ["test_signals.py"]),
        ("sdk/torchrun_sdk/serialization.py", ["sdk/test_serialization.py"]),
        ("plugin/kubectl_torchrun/upload/gitignore.py", ["plugin/upload/test_gitignore.py"]),
        # More than one file of tests, also in a folder of the module's name.
        (
            f"{CONTROLLER}/reconcile/gang/elastic.py",
            [
                "reconcile/gang/test_elastic.py",
                "reconcile/gang/test_elastic_admission.py",
                "reconcile/gang/test_elastic_obstacles.py",
                "reconcile/gang/test_elastic_resize.py",
                "reconcile/gang/test_elastic_waits.py",
            ],
        ),
        (
            f"{CONTROLLER}/workqueue.py",
            [
                "workqueue/test_async.py",
                "workqueue/test_core.py",
                "workqueue/test_invariants.py",
                "workqueue/test_retries.py",
            ],
        ),
        # test_command_end.py has the tests of command_end.py, which is beside command.py.
        ("runtime/torchrun_runtime/launch/command.py", ["runtime/launch/test_command.py"]),
        # A test file is its own test.
        ("tests/unit/watch/test_codec.py", ["watch/test_codec.py"]),
    ],
)
def test_a_file_has_the_tests_of_its_mirrored_path(source: str, tests: list[str]):
    expected = [Path("tests/unit") / test for test in tests]
    assert find_tests(Path(source)) == expected
    assert are_own(Path(source), expected)


def test_a_file_without_tests_has_those_of_its_folder():
    observed = Path(f"{CONTROLLER}/reconcile/model/observed.py")
    tests = find_tests(observed)
    assert not are_own(observed, tests)
    assert Path("tests/unit/reconcile/model/test_phases.py") in tests
    assert {test.parent for test in tests} == {Path("tests/unit/reconcile/model")}


def test_a_folder_without_tests_has_those_of_the_folder_above():
    tests = find_tests(Path("plugin/kubectl_torchrun/completion.py"))
    assert {test.parent for test in tests} == {Path("tests/unit/plugin")}


def test_a_missing_test_has_a_remedy(capsys: pytest.CaptureFixture[str]):
    assert main([f"{CONTROLLER}/nowhere.py"]) == 2
    assert "no such file" in capsys.readouterr().out
    assert main(["Dockerfile"]) == 2
    assert CONTROLLER in capsys.readouterr().out
    assert main([f"{CONTROLLER}/__init__.py"]) == 2
    assert "Write tests/unit/test___init__.py; CONTRIBUTING.md" in capsys.readouterr().out
    assert main([]) == 2
    with pytest.raises(NoTestsError):
        find_tests(Path("nothing.py"))


def test_mirrored_folders_exist():
    assert {
        folder for pair in MIRRORS.items() for folder in pair if not (ROOT / folder).is_dir()
    } == set()
    assert mirror_of(Path("docs/conf.py")) == Path("tests/unit/docs/test_conf.py")
