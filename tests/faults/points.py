"""The number of points for faults in each scenario, so that none vanishes unnoticed.

A change of the controller may add or save a request. If `test_the_number_of_points` fails, check
which ones changed (`python -m faults.points` with `tests` on the path prints the numbers), and
update the number here.
"""

from faults import campaign
from faults.scenarios import SCENARIOS

POINTS = {
    "node stays lost": 87,
    "node returns": 113,
    "node off": 109,
    "fence": 117,
    "suspended": 146,
    "elastic": 167,
    "pod replaced": 104,
    "leader replaced": 107,
    "pods replaced": 141,
    "no controller": 174,
    "no room": 149,
    "less room": 129,
    "machine off": 124,
    "node deleted": 121,
    "preemption": 176,
    "reclaim": 198,
    "deletion under quota": 115,
    "requests edited": 142,
    "depends": 112,
    "ttl": 70,
    "deadline": 68,
    "suspend backing off": 155,
    "queue edited": 116,
    "queue deleted": 123,
    "waiting": 84,
    "volcano": 105,
    "kai queue": 94,
    "setup": 122,
    "direct": 116,
    "reload": 90,
    "success": 64,
    "service taken": 74,
    "restart": 95,
    "large": 120,
    "restart in place": 105,
    "suspend": 110,
    "scale": 101,
    "delete": 60,
    "queue": 101,
    "leader": 102,
    "workspace": 81,
    "gangs": 126,
    "head": 84,
}
SLACK = 0.04  # one status update more or less is allowed

if __name__ == "__main__":
    for name in SCENARIOS:
        print(f'    "{name}": {len(campaign.points(name))},')
