"""Several controllers with one lease, and a stream of jobs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from integration.background import repeating
from integration.controller_process import ControllerProcess, eventually
from integration.team import Team
from torchrun_cluster import LocalCluster


def lasting(duration: str, deadline: str, retry: str) -> tuple[str, ...]:
    """Settings of a lease."""
    return (
        *("--lease-duration", duration),
        *("--lease-renew-deadline", deadline),
        *("--lease-retry-period", retry),
    )


class Replicas:
    """Controllers of one namespace with a lease in it."""

    def __init__(
        self, cluster: LocalCluster, team: Team, folder: Path, count: int, *arguments: str
    ) -> None:
        self._api = team.api
        self._lease = f"/apis/coordination.k8s.io/v1/namespaces/{team.name}/leases/ha"
        self._own = ("--lease-namespace", team.name, "--lease-name", "ha", *arguments)
        self._own = (*self._own, "--namespace", team.name)
        self.all = [self._replica(cluster, folder / str(number)) for number in range(count)]

    def _replica(self, cluster: LocalCluster, folder: Path) -> ControllerProcess:
        folder.mkdir()
        return ControllerProcess(cluster, folder, *self._own)

    @contextmanager
    def running(self) -> Iterator["Replicas"]:
        """Run all replicas until the end of the block. The test may kill any of them."""
        with self._started():
            self._wait_until_ready()
            yield self

    @contextmanager
    def running_with_restarts(self) -> Iterator["Replicas"]:
        """The same, and restart replicas that exit, as a kubelet does, also before they are ready."""
        with self._started(), repeating(self.revive, 0.2):
            self._wait_until_ready()
            yield self

    @contextmanager
    def _started(self) -> Iterator[None]:
        with ExitStack() as stack:
            for replica in self.all:
                stack.enter_context(_running(replica))
            yield

    def _wait_until_ready(self) -> None:
        self.leader()
        for replica in self.all:
            ready(replica)

    @property
    def holder(self) -> str:
        """The holder that the lease names."""
        holder: str = (self._api.get(self._lease) or {}).get("spec", {}).get("holderIdentity", "")
        return holder

    def leader(self, other_than: str = "") -> ControllerProcess:
        """Wait until the lease holder works, and return it."""

        def look() -> ControllerProcess | None:
            holder = self.holder
            if not holder or holder == other_than:
                return None
            for replica in self.all:
                lines = {line["message"]: line for line in replica.lines()}
                if "controllers started" in lines and lines["serving"]["identity"] == holder:
                    return replica if replica.is_running() else None
            return None

        return eventually("a leader that works", look)

    def standbys(self) -> list[ControllerProcess]:
        """The replicas that do not lead."""
        leader = self.leader()
        return [replica for replica in self.all if replica is not leader]

    def revive(self) -> None:
        """Restart ended replicas, as a kubelet does."""
        for replica in self.all:
            if not replica.is_running():
                replica.start()


def identity(replica: ControllerProcess) -> str:
    """The lease identity of the current process."""
    name: str = replica.wait_for_line("serving")["identity"]
    return name


def ready(replica: ControllerProcess) -> None:
    """Wait until it leads, or is a standby with filled caches."""

    def look() -> bool:
        # It may have restarted.
        site = f"http://127.0.0.1:{replica.wait_for_line('serving')['port']}/readyz"
        with suppress(httpx.HTTPError):
            return httpx.get(site, timeout=60).status_code == 200
        return False

    eventually("ready", look)


@contextmanager
def _running(replica: ControllerProcess) -> Iterator[None]:
    if not replica.is_running():
        replica.start()
    try:
        yield
    finally:
        if replica.is_running():
            replica.kill()


class Stream:
    """A stream of new jobs, so that the leader always has something to write."""

    def __init__(self, team: Team, pause: float = 0.05) -> None:
        self._team = team
        self._pause = pause
        self.names: list[str] = []

    @contextmanager
    def running(self) -> Iterator["Stream"]:
        """Until the end of the block."""
        with repeating(self._submit, self._pause):
            yield self

    def _submit(self) -> None:
        name = f"s-{len(self.names)}"
        self._team.submit(name, numNodes=1)
        self.names.append(name)
