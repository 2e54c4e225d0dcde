"""The port for reports of launchers."""

import http.client

import pytest

from kubectl_torchrun.local.progress_port import ProgressPort
from torchrun_controller.reconcile.model.observed import ProgressReport


@pytest.mark.parametrize(
    ("token", "path", "body", "status"),
    [
        ("good", "/v1/progress", b'{"step": 3}', 204),
        ("bad", "/v1/progress", b'{"step": 3}', 401),
        ("good", "/v1/progress", b'{"step": -1}', 400),
        ("good", "/v1/progress", b"[", 400),
        ("good", "/", b"{}", 404),
        ("good", "/v1/progress", b" " * 20_000, 404),
    ],
)
def test_only_a_report_with_a_token_is_taken(
    token: str, path: str, body: bytes, status: int
) -> None:
    received: list[tuple[str, ProgressReport]] = []
    port = ProgressPort(lambda uid, report: received.append((uid, report)))
    try:
        known = port.new_token("uid-1")
        connection = http.client.HTTPConnection(port.url.removeprefix("http://"), timeout=30)
        sent = known if token == "good" else "other"
        connection.request("POST", path, body, {"Authorization": f"Bearer {sent}"})
        assert connection.getresponse().status == status
        connection.close()
    finally:
        port.close()
    assert received == ([("uid-1", ProgressReport(step=3))] if status == 204 else [])
