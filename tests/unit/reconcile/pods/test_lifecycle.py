"""When a Job creates no more pods."""

import pytest
from msgspec.structs import replace

from admitting import running
from torchrun_api.kinds.core import JobStatus
from torchrun_api.kinds.meta import Condition
from torchrun_controller.reconcile.pods.lifecycle import may_create_pods
from world import START


@pytest.mark.parametrize(
    ("condition", "status", "creates_pods"),
    [
        ("Complete", "True", False),
        ("Failed", "True", False),
        ("Failed", "False", True),
        ("SuccessCriteriaMet", "True", False),
        ("FailureTarget", "True", False),
        ("Suspended", "True", True),
    ],
)
def test_the_conditions_of_a_job_tell_its_end(condition, status, creates_pods):
    (child,) = running().gangs
    conditions = (Condition(type=condition, status=status, reason="x"),)
    child = replace(child, status=JobStatus(conditions=conditions))
    assert may_create_pods(child) == creates_pods


def test_a_deleted_job_creates_no_pods():
    (child,) = running().gangs
    metadata = replace(child.metadata, deletion_timestamp=START)
    child = replace(child, metadata=metadata)
    assert not may_create_pods(child)
