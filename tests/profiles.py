"""Profiles of hypothesis: few examples by default, many in thorough runs.

`pytest --hypothesis-profile=thorough` draws 1,000 examples for every property. No profile has limits
of time, which would fail on a busy machine.
"""

from typing import Any

from hypothesis import HealthCheck, settings

THOROUGH = "thorough"

_NO_TIME_LIMITS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile(THOROUGH, max_examples=1000, **_NO_TIME_LIMITS)
settings.register_profile("usual", **_NO_TIME_LIMITS)
if settings.get_current_profile_name() == "default":  # hypothesis loads another one in CI
    settings.load_profile("usual")


def examples(count: int, **more: Any) -> settings:
    """Settings of a property that draws `count` examples, or more in a thorough run."""
    if settings.get_current_profile_name() == THOROUGH:
        count = max(count, settings.get_profile(THOROUGH).max_examples)
    return settings(max_examples=count, **more)
