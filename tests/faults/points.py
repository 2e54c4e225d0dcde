"""The number of points for faults in each scenario, so that none vanishes unnoticed.

A change of the controller may add or save a request. If `test_the_number_of_points` fails, check
which ones changed (`python -m faults.points` with `tests` on the path prints the numbers), and
update the number here.
"""

from faults import campaign
from faults.scenarios import SCENARIOS

POINTS = {
    "planned stops": 185,
    "no progress": 250,
    "node stays lost": 84,
    "node returns": 110,
    "node off": 106,
    "mass silence": 76,
    "evicted": 126,
    "machine leaves": 98,
    "fence": 112,
    "suspended": 144,
    "elastic": 167,
    "preemption": 172,
    "reclaim": 196,
    "deletion under quota": 110,
    "requests edited": 139,
    "depends": 109,
    "ttl": 67,
    "deadline": 65,
    "suspend backing off": 153,
    "queue edited": 113,
    "queue deleted": 120,
    "waiting": 81,
    "volcano": 102,
    "kai queue": 91,
    "setup": 121,
    "direct": 111,
    "reload": 87,
    "success": 61,
    "service taken": 71,
    "restart": 92,
    "large": 117,
    "restart in place": 102,
    "suspend": 106,
    "scale": 101,
    "delete": 57,
    "queue": 100,
    "leader": 95,
    "workspace": 76,
    "gangs": 125,
    "head": 81,
}
SLACK = 0.04  # one status update more or less is allowed

if __name__ == "__main__":
    for name in SCENARIOS:
        print(f'    "{name}": {len(campaign.points(name))},')
