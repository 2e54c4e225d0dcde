"""doctor without some permissions: of the controller, or of the user."""

import json

import pytest
from aiohttp import web

from ..api_server import refusal
from ..laptop import Laptop
from .healthy import POD, play_cluster


def test_missing_permissions_of_the_controller(laptop: Laptop) -> None:
    lines = (
        "[+] lease ok\n[-] permissions: grant the controller's role create jobs.batch\n"
        "[!] nodes: lost nodes are not detected\n"
    )
    readyz = f"{POD}:8080/proxy/readyz"

    def answer(request: web.Request) -> web.Response | None:
        if request.path == readyz:
            return web.Response(status=503, text=lines)
        return None

    replica = {"metadata": {"name": "c-1"}, "status": {"phase": "Running"}}
    starting = {"metadata": {"name": "c-2"}, "status": {"phase": "Pending"}}
    play_cluster(laptop, pods={"items": [replica, starting]})
    laptop.server.hooks.append(answer)
    result = laptop.run("doctor")
    assert result.exit_code == 1
    assert "permissions: grant the controller's role create jobs.batch" in result.stdout
    assert "nodes: lost nodes are not detected" in result.stdout
    laptop.server.hooks[-1] = lambda request: (
        refusal(403, "no proxy for you") if request.path == readyz else None
    )
    result = laptop.run("doctor")
    assert result.exit_code == 0
    assert "no permission to read it: no proxy for you" in result.stdout


@pytest.mark.parametrize(
    ("forbidden", "code", "text"),
    [
        ("torchrunjobs create", 1, "No permission to create torchrunjobs (needed for: submit)"),
        ("pods/exec create", 0, "No permission to create pods/exec (needed for: exec"),
    ],
)
def test_each_permission_is_checked(laptop: Laptop, forbidden: str, code: int, text: str) -> None:
    play_cluster(laptop, forbidden=(forbidden,))
    result = laptop.run("doctor")
    assert result.exit_code == code
    assert text in result.stdout
    assert "the role edit in namespace ns" in result.stdout


@pytest.mark.parametrize("word", ["apis", "daemonsets", "storageclasses", "nodes", "deployments"])
@pytest.mark.parametrize("broken", [403, "not JSON"])
def test_a_request_that_fails_costs_only_the_checks_that_need_it(
    laptop: Laptop, word: str, broken: object
) -> None:
    whole = subjects(laptop)
    laptop.server.hooks.clear()
    play_cluster(laptop, **{word: broken})
    result = laptop.run("doctor", "-o", "json")
    findings = json.loads(result.stdout)["findings"]
    skipped = {f["subject"] for f in findings if f["verdict"] == "skip"}
    assert skipped, findings
    assert {f["subject"] for f in findings} >= whole - {"GPUs", "shared", "leader"} - skipped
    assert all(f["text"].startswith("Not checked") for f in findings if f["verdict"] == "skip")
    assert "Jobs can run" not in result.stderr
    assert "could not be made" in result.stderr


def subjects(laptop: Laptop) -> set[str]:
    """The subjects of the findings of a healthy cluster."""
    play_cluster(laptop)
    findings = json.loads(laptop.run("doctor", "-o", "json").stdout)["findings"]
    assert not [f for f in findings if f["verdict"] == "skip"]
    return {f["subject"] for f in findings}


def test_reviews_that_are_refused_are_not_permissions(laptop: Laptop) -> None:
    play_cluster(laptop)
    laptop.server.hooks.append(
        lambda request: (
            refusal(403, "no reviews")
            if request.path.endswith("/selfsubjectaccessreviews")
            else None
        )
    )
    result = laptop.run("doctor", "-o", "json")
    (found,) = [f for f in json.loads(result.stdout)["findings"] if f["subject"] == "permissions"]
    assert (found["verdict"], found["text"][:11]) == ("skip", "Not checked")
