"""Leader election by a Lease, and the check that every write makes.

    leader = Leader(client, identity=..., namespace=..., name=..., durations=Durations())
    tasks.start_soon(leader.run)             # raises NotLeader on loss: stop at once
    await leader.elected.wait()
    leader.check()                           # before every write; raises NotLeader
    ...                                      # stop the controllers and cancel run, then
    await leader.release()

Guarantees:

- **Permission to write expires.** No write begins later than the renew deadline after the *sending*
  of the last successful renewal, even if the event loop or the network hangs, and none after the
  watch has shown another holder. A lease does not fence: a request in flight at that time may still
  arrive, and has lease duration - renew deadline (5 s) to do so.
- **Only time loses the lease.** Conflicts, 429, 500, timeouts and undecodable answers are retried
  until the deadline. A request without a response may have succeeded: the lease is read before the
  next write, and each write has the resourceVersion, so that a conflict is detected.
- **Handover is immediate.** Every replica watches the Lease and acquires a released one within
  milliseconds. Polling every 2 to 4.4 s covers a failed watch.
- **A busy process keeps the lease.** `LeaderThread` renews it while the main event loop is blocked.
  Its checks are made by the main loop, just before each write.

`election` decides and is pure; `elector` sends the requests; `thread` runs it beside the main loop.

Source: client-go tools/leaderelection, with its default durations.
"""

from torchrun_controller.leader.election import LEASES, Durations, Lease, LeaseSpec
from torchrun_controller.leader.elector import (
    Leader,
    Leadership,
    LeaseClient,
    NoElection,
    NotLeader,
)
from torchrun_controller.leader.thread import LeaderThread

__all__ = [
    "LEASES",
    "Durations",
    "Leader",
    "LeaderThread",
    "Leadership",
    "Lease",
    "LeaseClient",
    "LeaseSpec",
    "NoElection",
    "NotLeader",
]
