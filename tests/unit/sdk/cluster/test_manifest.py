"""What the SDK knows of the objects of a job without the package of the API."""

import pytest

from torchrun_api import names
from torchrun_sdk.cluster.manifest import child_job


@pytest.mark.parametrize("attempt", [0, 1, 12])
def test_the_names_of_child_jobs_are_those_of_the_api(attempt: int) -> None:
    labels = {names.ATTEMPT_LABEL: str(attempt)}
    head, worker = {names.ROLE_LABEL: names.HEAD}, {names.ROLE_LABEL: names.WORKER}
    assert child_job("train", labels) == names.child_job("train", attempt)
    assert child_job("train", labels | head) == names.child_job("train", attempt)
    assert child_job("train", labels | worker) == names.workers_job("train", attempt)
