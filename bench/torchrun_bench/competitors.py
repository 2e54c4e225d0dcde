"""What is compared: the controller, bare clients and JobSet, each as one process."""

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

from torchrun_api.json import JsonObject
from torchrun_bench import bodies, plans
from torchrun_bench.control_plane import wait_for_crds
from torchrun_bench.http import Server
from torchrun_bench.processes import bare, controller, free_port, running, until_ready
from torchrun_bench.report import say
from torchrun_cluster import ClusterError, LocalCluster, binaries

JOBSET = "sigs.k8s.io/jobset"
_JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"
_TORCHRUN_JOBS = "/apis/torchrun.ai/v1alpha1/namespaces/{}/torchrunjobs"


class Site(msgspec.Struct, frozen=True):
    """The API server of a part. `name` is that of its cluster."""

    name: str
    cluster: LocalCluster
    server: Server


class Running(msgspec.Struct, frozen=True):
    """A competitor's process. `port` serves /readyz; 0: it is ready once it is started."""

    pid: int
    port: int = 0

    def until_ready(self) -> None:
        """Wait until its caches are filled. Raises RuntimeError after a timeout."""
        if self.port:
            until_ready(self.port)


class Competitor(msgspec.Struct, frozen=True):
    """A program that creates a child Job for each object of a user.

    `start` takes the number of nodes of each job, which the bare clients have in their templates.
    """

    name: str
    about: str
    collection: str  # path of the user's objects, with {} for the namespace
    body: Callable[[str, int], JsonObject]
    start: Callable[[Site, int], AbstractContextManager[Running]]
    child: str = "{}"  # name of the child Job
    restarts: bool = True  # whether it finds the objects that were created while it was down

    @property
    def resource(self) -> str:
        """The resource of the user's objects, which the load creates."""
        return self.collection.rpartition("/")[2]


@contextmanager
def _controller(site: Site, nodes: int) -> Iterator[Running]:
    port = free_port()
    with controller(site.cluster.kubeconfig, port) as process:
        yield Running(process.pid, port)


@contextmanager
def _applies(site: Site, nodes: int) -> Iterator[Running]:
    with bare(site.server, "", plan=plans.same_writes(nodes)) as process:
        yield Running(process.pid)


@contextmanager
def _posts(site: Site, nodes: int) -> Iterator[Running]:
    with bare(site.server, "", plan=plans.only_the_job(nodes)) as process:
        yield Running(process.pid)


@contextmanager
def _jobset(site: Site, nodes: int) -> Iterator[Running]:
    """JobSet without leader election and webhooks. Its webhook server listens nevertheless."""
    port, program = free_port(), binaries.ensure(["jobset"])["jobset"]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as log:
        folder = Path(name)
        on = site.cluster
        for source, target in ((on.client_certificate, "tls.crt"), (on.client_key, "tls.key")):
            (folder / target).write_bytes(source.read_bytes())
        (folder / "config.json").write_bytes(msgspec.json.encode(configuration(folder, port)))
        command = [str(program), "--config", str(folder / "config.json")]
        command += ["--kubeconfig", str(on.kubeconfig)]
        with running(command, log.fileno(), log.fileno()) as process:
            yield Running(process.pid, port)


def configuration(certificates: Path, port: int) -> JsonObject:
    """JobSet's configuration file: its defaults, on free ports, for one process."""
    return {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"port": free_port(), "host": "127.0.0.1", "certDir": str(certificates)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{port}"},
    }


def _as_jobset(name: str, nodes: int) -> JsonObject:
    return bodies.jobset(name, nodes, service=True)


def _as_jobset_alone(name: str, nodes: int) -> JsonObject:
    return bodies.jobset(name, nodes, service=False)


CONTROLLER = Competitor(
    "controller", "the controller", _TORCHRUN_JOBS, bodies.torchrun_job, _controller
)
APPLY = Competitor(
    "bare apply", "a bare client with the same server-side applies",
    _TORCHRUN_JOBS, bodies.torchrun_job, _applies, restarts=False,
)  # fmt: skip
POST = Competitor(
    "bare POST", "a bare client that POSTs a plain Job",
    _TORCHRUN_JOBS, bodies.torchrun_job, _posts, restarts=False,
)  # fmt: skip
_CHILD = f"{{}}-{bodies.WORKERS}-0"
JOBSET_SERVICE = Competitor(
    "JobSet", "JobSet with its headless Service", _JOBSETS, _as_jobset, _jobset, _CHILD
)
JOBSET_ALONE = Competitor(
    "JobSet, no Service", "JobSet without its headless Service",
    _JOBSETS, _as_jobset_alone, _jobset, _CHILD,
)  # fmt: skip
COMPETITORS = (CONTROLLER, APPLY, POST, JOBSET_SERVICE, JOBSET_ALONE)


def available(site: Site) -> tuple[Competitor, ...]:
    """The competitors of this run. Installs the CRD of JobSet, or prints why it is left out."""
    try:
        binaries.ensure(["jobset"])
        crds = binaries.module_folder("jobset") / "config" / "components" / "crd" / "bases"
    except ClusterError as error:
        say(f"JobSet is left out: {error}")
        return tuple(one for one in COMPETITORS if one.collection != _JOBSETS)
    for crd in sorted(crds.glob("*.yaml")):
        site.cluster.kubectl("apply", "--server-side", "-f", str(crd))
    wait_for_crds(site.cluster)
    return COMPETITORS


def versions() -> dict[str, str]:
    """The versions of the other programs."""
    with contextlib.suppress(ClusterError, subprocess.SubprocessError):
        programs = {"kubernetes": "kube-apiserver", "jobset": "jobset"}
        return {name: binaries.version_of(program) for name, program in programs.items()}
    return {}
