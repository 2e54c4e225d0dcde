"""The table of sources that a sync pod fetches."""

from torchrun_api.kinds.workspace import FETCHED_SOURCES
from torchrun_runtime.sync.fetch import FETCHERS


def test_each_fetched_source_has_a_fetcher() -> None:
    assert FETCHERS.keys() == set(FETCHED_SOURCES)
