"""A reason that ends only if somebody acts has a link, in the status and in the event."""

import pytest
from msgspec.structs import replace

from torchrun_controller.reconcile.model.conditions import BLOCKED_REASONS, Reason, linked
from world import World, make_job, make_queue

SITE = "https://docs.example.com/torchrun"


@pytest.mark.parametrize("reason", [*sorted(BLOCKED_REASONS), "WaitingForNodes", "Exception"])
@pytest.mark.parametrize("site", ["", SITE])
def test_only_a_blocking_reason_has_a_link(reason: str, site: str) -> None:
    why = Reason(reason, "Create it.")
    page = f" {site}/docs/troubleshooting.html#reason-{reason.lower()}"
    ending = page if site and reason in BLOCKED_REASONS else ""
    assert linked(why, site) == Reason(reason, "Create it." + ending)


def test_the_status_and_the_event_have_the_link() -> None:
    world = World(make_job(jobQueue="missing"), make_queue())
    world.defaults = replace(world.defaults, docs_url=SITE)
    plan = world.plan()
    assert plan.status is not None
    link = f"{SITE}/docs/troubleshooting.html#reason-queuenotfound"
    assert plan.status.reason == "QueueNotFound"
    assert plan.status.message.endswith(link)
    assert [event.message.endswith(link) for event in plan.events] == [True]
