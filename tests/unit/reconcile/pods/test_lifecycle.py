"""When a Job has finished, and when it creates no more pods."""

import pytest
from msgspec.structs import replace

from admitting import running
from torchrun_api.core import JobStatus
from torchrun_api.meta import Condition
from torchrun_controller.reconcile.pods.lifecycle import has_finished, may_create_pods
from world import START


@pytest.mark.parametrize(
    ("condition", "status", "finished", "creates_pods"),
    [
        ("Complete", "True", True, False),
        ("Failed", "True", True, False),
        ("Failed", "False", False, True),
        ("SuccessCriteriaMet", "True", False, False),
        ("FailureTarget", "True", False, False),
        ("Suspended", "True", False, True),
    ],
)
def test_the_conditions_of_a_job_tell_its_end(condition, status, finished, creates_pods):
    (child,) = running().gangs
    conditions = (Condition(type=condition, status=status, reason="x"),)
    child = replace(child, status=JobStatus(conditions=conditions))
    assert (has_finished(child), may_create_pods(child)) == (finished, creates_pods)


def test_a_deleted_job_creates_no_pods():
    (child,) = running().gangs
    metadata = replace(child.metadata, deletion_timestamp=START)
    child = replace(child, metadata=metadata)
    assert (has_finished(child), may_create_pods(child)) == (False, False)
