"""The number of hypothesis examples: few by default, many in thorough runs.

`pytest --hypothesis-profile=thorough` draws 1,000 examples for every property.
"""

from typing import Any

from hypothesis import settings

THOROUGH = "thorough"

settings.register_profile(THOROUGH, max_examples=1000)


def examples(count: int, **more: Any) -> settings:
    """Settings of a property that draws `count` examples, or more by the profile; no deadline."""
    if settings.get_current_profile_name() == THOROUGH:
        count = max(count, settings.get_profile(THOROUGH).max_examples)
    return settings(max_examples=count, deadline=None, **more)
