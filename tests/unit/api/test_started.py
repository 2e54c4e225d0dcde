"""One condition for all that is fixed once a job has started: it stands in the CRD and the policy."""

from pathlib import Path

from torchrun_api.job import TorchrunJob, has_started

POLICY = Path(__file__).parents[3] / "manifests/crd/torchrunjob-command-policy.yaml"


def test_every_transition_rule_depends_on_it():
    rules = [rule.rule for rule in TorchrunJob.RULES if "oldSelf" in rule.rule]
    assert len(rules) > 5
    for rule in rules:
        assert rule.startswith((f"!{has_started('oldSelf')}", f"(!{has_started('oldSelf')} &&"))


def test_so_does_the_policy_of_commands():
    assert f"!{has_started('oldObject')} ||" in " ".join(POLICY.read_text().split())
