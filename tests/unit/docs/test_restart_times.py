"""The times of restarts in docs/design.md come from the stored measurement."""

import msgspec

from e2e.restart_times import KEPT, PAGE, Measurement, write_page


def test_the_page_has_the_stored_times():
    measurement = msgspec.json.decode(KEPT.read_bytes(), type=Measurement)
    text = PAGE.read_text()
    assert write_page(text, measurement) == text, "run: python -m e2e.restart_times"
