"""The parts of a simulated gang: processes, the launchers in them, and their connections."""

from torchrun_runtime.launch.gang.greeting import KnownLaunchers
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.member import GangMember
from torchrun_runtime.launch.gang.messages import GangOrder
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from torchrun_runtime.launch.gang.stopping import Agreement, Vote

MOST_RESTARTS = 4


class Process:
    """The process of one pod, which may be stopped and continued (SIGSTOP, SIGCONT)."""

    def __init__(self) -> None:
        self.paused_until = 0.0


class Node:
    """One pod of a node: its launcher, its connection, and its ranks.

    run: how often the Job was resumed before.
    """

    def __init__(self, index: int, run: int, process: Process | None = None) -> None:
        self.index = index
        self.run = run
        self.id = f"{index} of run {run}"
        self.process = process or Process()
        self.member = GangMember()
        self.connection: Connection | None = None
        self.lost_at = 0.0
        self.leader: str | None = None  # the last one that it was connected to
        self.order: GangOrder | None = None
        self.agreement: Agreement | None = None
        self.vote: Vote | None = None
        self.is_busy = False  # the main thread follows an order
        self.ranks = 0  # changes when ranks start or end
        self.checks = ""  # digest of the checkpoints that it looks for
        self.is_gone = self.has_ended = False

    @property
    def follows(self) -> bool:
        """Whether its launcher follows orders."""
        return not (self.is_gone or self.has_ended)


class Lead:
    """The leader in one pod of node 0, with its server. run: as of a node."""

    def __init__(self, size: int, run: int) -> None:
        self.run = run
        self.id = f"0 of run {run}"
        self.process = Process()
        self.leader = GangLeader(size, RestartPolicy(RestartLimits(MOST_RESTARTS)))
        self.sent: GangOrder | None = None
        self.sent_agreement: Agreement | None = None
        self.connections: dict[int, Connection] = {}  # of the nodes that have joined
        self._launchers = KnownLaunchers()

    def check(self, node: Node) -> None:
        """Raise InvalidMessageError if the launcher may not join."""
        if node.index:
            self._launchers.check(node.index, node.id, has_started=self.leader.has_started)

    def join(self, node: Node) -> None:
        """Note the launcher of a node."""
        if node.index:
            self._launchers.join(node.index, node.id)


class Connection:
    """A connection of a node to a leader. is_broken: whatever is under way is lost."""

    def __init__(self, node: Node, lead: Lead) -> None:
        self.node, self.lead = node, lead
        self.is_broken = self.has_joined = False
        self.arrivals: dict[str, float] = {}  # the latest of each direction
