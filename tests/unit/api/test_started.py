"""The CRD and the policy share one condition for fields that are immutable after the start."""

from pathlib import Path

from torchrun_api.kinds.job import TorchrunJob, has_started

POLICY = Path(__file__).parents[3] / "manifests/crd/torchrunjob-command-policy.yaml"


def test_every_transition_rule_depends_on_it():
    rules = [rule.rule for rule in TorchrunJob.RULES if "oldSelf" in rule.rule]
    assert len(rules) > 5
    for rule in rules:
        assert rule.startswith((f"!{has_started('oldSelf')}", f"(!{has_started('oldSelf')} &&"))


def test_the_policy_of_commands_depends_on_it():
    assert f"!{has_started('oldObject')} ||" in " ".join(POLICY.read_text().split())
