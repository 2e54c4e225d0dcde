"""The number of points for faults in each scenario, so that none vanishes unnoticed.

A change of the controller may add or save a request. If `test_the_number_of_points` fails, check
which ones changed (`python -m faults.points` with `tests` on the path prints the numbers), and
update the number here.
"""

from faults import campaign
from faults.scenarios import SCENARIOS

POINTS = {
    "node returns": 110,
    "node off": 105,
    "fence": 116,
    "elastic": 171,
    "preemption": 180,
    "reclaim": 194,
    "deletion under quota": 115,
    "depends": 112,
    "ttl": 70,
    "deadline": 68,
    "suspend backing off": 155,
    "queue edited": 116,
    "queue deleted": 123,
    "waiting": 84,
    "volcano": 109,
    "kai queue": 95,
    "setup": 134,
    "direct": 126,
    "reload": 93,
    "success": 65,
    "restart": 105,
    "large": 118,
    "restart in place": 105,
    "suspend": 116,
    "scale": 113,
    "delete": 61,
    "queue": 105,
    "leader": 103,
    "workspace": 82,
    "gangs": 129,
    "head": 96,
}
SLACK = 0.04  # one status update more or less is allowed

if __name__ == "__main__":
    for name in SCENARIOS:
        print(f'    "{name}": {len(campaign.points(name))},')
