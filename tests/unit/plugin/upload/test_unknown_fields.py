"""Fields that a kind does not have: the first one is named with its path and what is meant."""

import pytest

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload.unknown_fields import check_fields
from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue


@pytest.mark.parametrize(
    ("kind", "spec", "problem"),
    [
        (TorchrunJob, {"numNode": 2}, "spec has no field numNode. Did you mean numNodes?"),
        (TorchrunJob, {"zzz": 2}, "spec has no field zzz."),
        (
            TorchrunJob,
            {"volumes": {"workspace": {"deliver": "direct"}}},
            "spec.volumes.workspace has no field deliver. Did you mean delivery?",
        ),
        (TorchrunJob, {"env": [{"name": "A", "val": "1"}]}, "spec.env[0] has no field val."),
        (TorchrunJob, {"reliability": {"podReplacement": {}}}, "spec.reliability.podReplacement: "),
        (TorchrunQueue, {"nodeResources": {"gpu": 1}}, "Did you mean gpus?"),
    ],
)
def test_the_first_unknown_field_is_named(kind: type, spec: JsonObject, problem: str) -> None:
    with pytest.raises(UsageProblem) as error:
        check_fields("job.yaml", {"spec": spec}, kind)
    assert str(error.value).startswith("job.yaml: ")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"numNodes": 2, "elastic": {"minNodes": 1}, "dependsOn": [{"name": "a"}]},
        {"numNodes": "two"},  # the type is another check
        {"podTemplate": {"spec": {"anything": [{"goes": 1}]}}},
        None,
    ],
)
def test_known_and_open_fields_pass(spec: JsonObject) -> None:
    check_fields("job.yaml", {"spec": spec}, TorchrunJob)
