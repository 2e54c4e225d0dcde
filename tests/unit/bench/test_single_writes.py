"""The pure parts of the bench of single writes."""

import msgspec

from torchrun_bench import single_writes
from torchrun_bench.single_writes import Cost


def test_each_write_has_its_own_target_and_body() -> None:
    variants = single_writes.variants()
    kinds = {name: msgspec.json.decode(each.body)["kind"] for name, each in variants.items()}
    assert kinds == {
        "plain Job, POST": "Job",
        "child Job, POST": "Job",
        "child Job, apply": "Job",
        "Service, POST": "Service",
        "Service, apply": "Service",
        "TorchrunJob, POST": "TorchrunJob",
        "status, apply": "TorchrunJob",
    }
    applies = [each for name, each in variants.items() if name.endswith("apply")]
    assert all(each.method == "PATCH" and "/{}" in each.target for each in applies)
    posts = [each for name, each in variants.items() if name.endswith("POST")]
    assert all(each.method == "POST" and "/{}" not in each.target for each in posts)
    status = msgspec.json.decode(variants["status, apply"].body)
    assert "spec" not in status
    assert status["status"]["phase"] == "Queued"


def test_a_write_is_compared_with_another_way_to_do_the_same() -> None:
    costs = {name: Cost(float(n), n / 2) for n, name in enumerate(single_writes.variants(), 1)}
    made = {row.what: (row.controller, row.bare) for row in single_writes.rows(costs)}
    assert made["child Job, apply, beside a POST: p50"] == (3.0, 2.0)
    assert made["child Job, POST, beside that of a plain Job: API server's CPU"] == (1.0, 0.5)
    assert made["status, apply: p50"] == (7.0, None)
