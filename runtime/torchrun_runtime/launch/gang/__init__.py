"""The launchers of a gang act together: they start, stop and end their ranks in rounds.

The launcher of node 0 is the leader. The others, the members, connect to it and report their state:

    {"state": "ready", "round": -1}                the ranks of this round and before are dead
    {"state": "running", "round": 0}
    {"state": "succeeded", "round": 0}
    {"state": "failed", "round": 0, "cause": {}}   why: see launch.cause.Cause
    {"state": "leaving", "round": 0}               Kubernetes has asked the pod to end

The leader sends all members the same order:

    {"order": "open"}                              the gate is open: take part in the fence
    {"order": "start", "round": 0, "restarts": 0, "revision": 3, "served": ""}   run this code
    {"order": "stop", "round": 0, "failed": true, "edit": false}   end the ranks
    {"order": "exit"}                              end with your own result, once the command ends

A member adds `"debugged": true` while someone debugs one of its ranks, and the leader adds it to
the order to start: every hang watch pauses.

Both sides repeat their latest message after a new connection, so a lost, late or repeated message
does no harm. A round starts once the ranks of the round before are dead on every node. The leader
takes part in the rounds like a member, without a connection. A node that still copies the code of a
round counts as running, and is ready for the next one as soon as the leader stops the round.

A pod that is lost ends the gang. Kueue may end the pods of a Job before they have started, and
create others later: the leader then takes the latest launcher of each node.

`leader` decides and is pure, `policy` decides on restarts, `greeting` on which launcher speaks for
a node, `messages` has the messages, `server` and `connection` move them.
"""
