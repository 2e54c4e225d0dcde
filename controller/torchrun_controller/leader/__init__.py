"""Leader election by a Lease, and the gate that every write passes.

    leader = Leader(transport, identity=..., namespace=..., name=..., durations=Durations())
    run = asyncio.create_task(leader.run())  # raises NotLeader on loss: stop at once
    await leader.elected.wait()
    leader.check()                           # before every write; raises NotLeader
    ...                                      # at the end stop the workers, cancel run, and then
    await leader.release()

What holds:

- **The gate closes by itself.** No write begins later than the *sending* of the last successful
  renewal + the renew deadline, whatever the event loop or the network is doing; nor after the watch
  has shown another holder. A lease does not fence: a request that is under way then may still
  arrive, and has lease duration - renew deadline (5 s) to do so.
- **Nothing but time loses the lease.** Conflicts, 429, 500, timeouts and garbage are retried until
  the deadline. An answer that was lost may have been a success: the lease is read before it is
  written again, and every write carries the resourceVersion, so that a conflict is seen.
- **Handover at once.** Everybody watches the Lease and takes a released one within milliseconds;
  the polling every 2 to 4.4 s is for the case that the watch fails.

`election` decides and is pure; `elector` carries decisions out.

Source: client-go tools/leaderelection, whose default durations are kept.
"""

from torchrun_controller.leader.election import LEASES, Durations, Lease, LeaseSpec
from torchrun_controller.leader.elector import Leader, Leadership, NoElection, NotLeader, Requests

__all__ = [
    "LEASES",
    "Durations",
    "Leader",
    "Leadership",
    "Lease",
    "LeaseSpec",
    "NoElection",
    "NotLeader",
    "Requests",
]
