"""A pod that Kubernetes ends while its ranks end for the next round."""

import pytest

from unit.runtime.launch.gang.test_gang import GangFactory, ends, make_gang
from unit.runtime.launching import changed

pytestmark = pytest.mark.long  # processes

__all__ = ["make_gang"]

COMMAND = """
if [ $NODE_RANK = 0 ]; then
    until [ -e $SHARED/up ]; do sleep 0.05; done
    exit 42
fi
trap 'echo saving; n=$((n+1)); [ $n = 2 ] && exit 0' TERM
touch $SHARED/up
while :; do sleep 0.05; done
"""


def test_the_cause_is_the_end_of_the_pod(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    patient = {"round.py": {"_ROUND_GRACE = 5.0": "_ROUND_GRACE = 300.0"}}
    gang.launchers[1] = changed(gang.launchers[1], patient)
    gang.annotate(start="1")
    running = gang.start(COMMAND)
    assert running[1].line() == "saving"
    running[1].stop()
    end = ends(running)[1]
    assert (end.exit_code, end.message["reason"]) == (143, "Stopped")
