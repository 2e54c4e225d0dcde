import pytest

from torchrun_controller.serving import connections
from torchrun_controller.serving.progress import endpoint, tokens


@pytest.fixture(autouse=True)
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the limits set their own. On a busy machine, others may exceed the usual ones."""
    monkeypatch.setattr(tokens, "REVIEW_TIMEOUT", 300.0)
    monkeypatch.setattr(endpoint, "BODY_SECONDS", 300.0)
    monkeypatch.setattr(connections, "CONNECTION_SECONDS", 300.0)
