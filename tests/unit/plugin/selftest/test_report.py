"""The files of a self-test: complete, and without names."""

from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from kubectl_torchrun.selftest import report
from kubectl_torchrun.selftest.checks import JOBS, Judgement, judge, skip
from kubectl_torchrun.selftest.report import Facts
from torchrun_api.json import object_at

from .test_checks import GOOD, GPU

FACTS = Facts("2026-11-30", 2, "0.1.0 (checkout)", "0.1.0", "v1.35.0+k3s1", GPU, True, 301.26)
RESULTS = [each for name, job in JOBS.items() for each in judge(job, GOOD[name])]


def test_the_json_has_versions_hardware_and_each_check() -> None:
    body = report.as_json(FACTS, RESULTS)
    assert (body["schema"], body["passed"], body["seconds"]) == ("torchrun-selftest/1", True, 301.3)
    assert body["hardware"] == {
        "gpu": "NVIDIA H100", "gpuMemoryBytes": None, "gpus": 2, "ranks": 2, "nodes": 2,
        "backend": "nccl", "checkpointFiles": True,
    }  # fmt: skip
    assert body["versions"] == {
        "plugin": "0.1.0 (checkout)", "controller": "0.1.0", "kubernetes": "v1.35.0+k3s1",
        "python": "3.12.3", "torch": "2.9.0", "cuda": None, "nccl": None, "driver": None,
    }  # fmt: skip
    checks = body["checks"]
    assert isinstance(checks, list)
    names = ["bandwidth", "transport", "kill", "memory", "delete", "hang", "stop"]
    assert [each["name"] for each in checks if isinstance(each, dict)] == names
    assert {each["result"] for each in checks if isinstance(each, dict)} == {"passed"}


@pytest.mark.parametrize(
    ("verdicts", "passed"), [("ps", True), ("pf", False), ("ss", False), ("", False)]
)
def test_a_report_passes_without_failures(verdicts: str, passed: bool) -> None:
    found = {"p": Judgement(), "f": Judgement(["it broke"]), "s": Judgement(skipped="no time")}
    results = [RESULTS[0]._replace(found=found[each]) for each in verdicts]
    assert report.has_passed(results) == passed


def test_the_page_is_whole_and_loads_nothing() -> None:
    page = report.as_html(FACTS, [*RESULTS, *skip(JOBS["stop"], "<b>no time</b>")])
    open_tags: list[str] = []

    class Page(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            assert tag not in ("script", "link", "img")
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Page().feed(page)
    assert not open_tags
    assert "7 of 8 checks passed in 301 s" in page
    assert "&lt;b&gt;no time&lt;/b&gt;" in page
    assert "url(" not in page


@pytest.mark.parametrize("text", ["registry.corp/torch:2", "10.0.0.7", "a\nb", "x" * 65, "ü"])
def test_what_is_no_version_is_left_out(text: str) -> None:
    facts = FACTS._replace(kubernetes=text, ranks=replace(GPU, torch=text, gpu=text))
    written = report.as_json(facts, RESULTS)
    assert text not in str(written)
    assert object_at(written, "versions")["torch"] is None
