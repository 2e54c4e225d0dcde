"""`make all` with short suites: failures, resume, skips, interruption."""

import os
import re
import signal
from pathlib import Path

import pytest

from everything import junit
from unit.everything.checkout import NO_GPU, Checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path)


def test_suites_run_in_order_and_a_failure_does_not_stop_them(checkout: Checkout) -> None:
    code, output = checkout.run("bad", "good", "tested")
    assert code == 1
    assert checkout.ran == ["bad", "good", "tested"]
    assert "[1/3] bad: starts; output in build/all/bad/output.log" in output
    assert re.search(r"\[1/3\] bad: NOT PASSED \(exit code 2\) in \d+ s", output)
    assert re.search(r"\[3/3\] tested: passed in \d+ s, 1 tests, 0 skipped", output)
    assert "2 of 3 suites passed" in output


def test_what_has_passed_is_not_run_again_until_asked(checkout: Checkout) -> None:
    assert checkout.run("good", "fickle")[0] == 1
    (checkout.root / "repaired").touch()
    code, output = checkout.run("good", "fickle")
    assert code == 0
    assert "good: has passed on this commit" in output
    assert checkout.ran == ["good", "fickle", "fickle"]
    assert checkout.run("good", "fickle", again=True)[0] == 0
    assert checkout.ran == ["good", "fickle", "fickle", "good", "fickle"]


def test_another_commit_runs_everything(checkout: Checkout) -> None:
    checkout.run("good", "tested")
    (checkout.root / "README").touch()
    checkout.commit()
    _, output = checkout.run("good")
    assert re.search(r"good: starts, took \d+ s last time", output)
    assert checkout.ran == ["good", "tested", "good"]
    assert list(checkout.results) == ["good"]
    assert not (checkout.root / "build/all/tested").exists()


@pytest.mark.parametrize("name", ["Makefile", "new"])
def test_results_of_a_dirty_tree_are_of_the_same_changes_only(
    checkout: Checkout, name: str
) -> None:
    checkout.run("good")
    for text in ("# one\n", "# two\n"):
        with (checkout.root / name).open("a") as file:
            file.write(text)
        code, output = checkout.run("good")
        assert code == 0
        assert "changes that are not committed" in output
    assert checkout.ran == ["good"] * 3
    assert "has passed" in checkout.run("good")[1]


def test_a_skip_without_a_listed_reason_fails(checkout: Checkout) -> None:
    code, output = checkout.run("skipping")
    assert code == 1
    assert "NOT PASSED (1 skipped without a listed reason)" in output
    unlisted = "skipped in skipping without a listed reason: t.a::two[x]: no GPU: none of 8"
    assert unlisted in output


def test_a_skip_with_a_listed_reason_passes(checkout: Checkout) -> None:
    code, output = checkout.run("skipping", accepted=(NO_GPU,))
    assert code == 0
    assert "skipped in skipping: 1 tests: machines without a GPU" in output


@pytest.mark.parametrize("field", ["suite", "test", "reason"])
def test_an_entry_is_of_a_suite_a_test_and_a_reason(checkout: Checkout, field: str) -> None:
    other = type(NO_GPU)(
        **{**{f: getattr(NO_GPU, f) for f in NO_GPU.__struct_fields__}, field: "x"}
    )
    code, output = checkout.run("skipping", accepted=(other,))
    assert code == 1
    assert f"accepted, but nothing is skipped for it: {other.suite}: {other.test}" in output


def test_failed_tests_and_none_at_all(checkout: Checkout) -> None:
    code, output = checkout.run("failing", "silent")
    assert code == 1
    assert "[1/2] failing: NOT PASSED (1 failed)" in output
    assert "failed in failing: t.a::one" in output
    assert "[2/2] silent: NOT PASSED (no test ran)" in output


def test_a_suite_has_its_variables_and_not_those_of_make_all(checkout: Checkout) -> None:
    assert checkout.run("variable")[0] == 0


def test_a_suite_without_pytest_has_a_junit_file(checkout: Checkout) -> None:
    checkout.run("good", "bad")
    good, bad = (junit.read(checkout.root / "build" / "all" / name) for name in ("good", "bad"))
    assert good == [junit.Case("good")]
    assert bad == [junit.Case("bad", failed=True)]


def ready(checkout: Checkout) -> int:
    """The process of the suite, which writes to a named pipe when it can be interrupted."""
    return int((checkout.root / "pid").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_suite_and_the_next_run_continues(
    checkout: Checkout, number: signal.Signals
) -> None:
    os.mkfifo(checkout.root / "pid")
    process = checkout.start("good", "slow", "tested")
    suite = ready(checkout)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the same command continues" in output
    assert checkout.ran == ["good", "slow", "ended"]
    with pytest.raises(ProcessLookupError):
        os.kill(suite, 0)
    assert checkout.results["slow"]["problem"] == "interrupted"
    assert "slow" not in checkout.summary["times"]
    assert "| tested | not run |" in output
    checkout.run("good", "tested")
    assert checkout.ran == ["good", "slow", "ended", "tested"]


def test_another_ctrl_c_does_not_wait(checkout: Checkout) -> None:
    os.mkfifo(checkout.root / "pid")
    process = checkout.start("stubborn")
    suite = ready(checkout)
    process.send_signal(signal.SIGINT)
    assert process.stdout
    assert any("waiting up to 120 s" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(suite, 0)
    assert checkout.ran == ["stubborn", "ended"]


def test_a_suite_that_does_not_end_is_ended(checkout: Checkout) -> None:
    # For both, and so long that a busy machine gets to the end of the second.
    code, output = checkout.run("slow", "good", limit=10)
    assert code == 1
    assert "slow: NOT PASSED (did not end within 0 min)" in output
    assert checkout.ran[0] == "slow"
    assert checkout.ran[-1] == "good"
