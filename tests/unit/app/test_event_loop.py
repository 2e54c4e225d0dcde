"""Which event loop the process runs on."""

import sys

import pytest
import uvloop

from torchrun_controller.app import _loop_factory


def test_uvloop_where_there_is_one() -> None:
    assert _loop_factory(True) is uvloop.new_event_loop


def test_asyncios_own_where_it_is_not_wanted() -> None:
    assert _loop_factory(False) is None


def test_asyncios_own_where_there_is_no_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert _loop_factory(True) is None
