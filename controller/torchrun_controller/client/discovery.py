"""Discovery of the installed gang schedulers: the API kinds that the server serves, kept current.

Every few seconds it sends one conditional request for the aggregated discovery document
(kubernetes.io, "Discovery API"), answered with 304 and no body while nothing has changed. Every
account may send it (ClusterRole system:discovery), while a watch of CustomResourceDefinitions needs
a cluster-wide permission. It also shows kinds that an API server flag enables without a CRD.
"""

from collections.abc import Awaitable, Callable
from typing import NoReturn

import anyio
import msgspec
import structlog

from torchrun_api.kinds.meta import Wire
from torchrun_api.kinds.resources import KAI_TOPOLOGIES, TORCHRUN_JOBS, TORCHRUN_QUEUES
from torchrun_api.names import OWN_CATEGORY
from torchrun_controller.client import ApiError, ConfigError, Disconnected, Transport
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.table import API_GROUPS

INTERVAL = 10.0  # seconds between two requests
# v2 since Kubernetes 1.30, v2beta1 since 1.26.
ACCEPT = ",".join(
    f"application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList"
    for version in ("v2", "v2beta1")
)

_OWN = frozenset((kind.api_version, kind.plural) for kind in (TORCHRUN_JOBS, TORCHRUN_QUEUES))

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class _Name(Wire, frozen=True, kw_only=True):
    name: str = ""


class _Resource(Wire, frozen=True, kw_only=True):
    resource: str = ""
    categories: tuple[str, ...] = ()


class _Version(Wire, frozen=True, kw_only=True):
    version: str = ""
    resources: tuple[_Resource, ...] = ()


class _Group(Wire, frozen=True, kw_only=True):
    metadata: _Name = _Name()
    versions: tuple[_Version, ...] = ()


class _TopologyList(Wire, frozen=True, kw_only=True):
    """The fields that are read of a list of KAI's Topology objects."""

    items: tuple[_Group, ...] = ()


class _Document(Wire, frozen=True, kw_only=True):
    """The fields that are read of apidiscovery.k8s.io APIGroupDiscoveryList."""

    kind: str = ""
    items: tuple[_Group, ...] = ()


_decode = msgspec.json.Decoder(_Document).decode
_decode_list = msgspec.json.Decoder(_TopologyList).decode


def _read_document(body: bytes) -> _Document:
    document = _decode(body)
    if document.kind != "APIGroupDiscoveryList":
        raise ValueError(
            f"{document.kind or 'no'} list: aggregated discovery needs Kubernetes 1.26 or newer"
        )
    return document


def _check_own(document: _Document) -> None:
    """Raise ConfigError if the kinds of users have the schema of another controller.

    The Go version has the same group, names and version. This controller would take its running
    jobs for new ones.
    """
    foreign = [
        f"{resource.resource}.{group.metadata.name}"
        for group in document.items
        for version in group.versions
        for resource in version.resources
        if (f"{group.metadata.name}/{version.version}", resource.resource) in _OWN
        and OWN_CATEGORY not in resource.categories
    ]
    if foreign:
        raise ConfigError(
            f"the CRDs {' and '.join(foreign)} are not those of this controller (they lack the"
            f" category {OWN_CATEGORY}), but for example of its Go version. Let the jobs of the"
            " other controller end, and remove it. Then apply the CRDs of this release: kubectl"
            " apply --server-side -f manifests/crd"
        )


class Discovery:
    """The kinds of gang schedulers that the API server serves. Polls while `run` runs.

    `installed` is None until the API server has answered once; a later failure keeps the last
    answer. Listeners are called after each change.
    """

    def __init__(
        self,
        transport: Transport,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.installed: Installed | None = None
        self.first_poll = anyio.Event()  # set after the first request, successful or not
        self._transport = transport
        self._sleep = sleep
        self._listeners: list[Callable[[Installed], None]] = []
        self._etag = ""
        self._resources: frozenset[tuple[str, str]] = frozenset()
        self._problem = "no response yet"

    def subscribe(self, listener: Callable[[Installed], None]) -> None:
        """Call `listener` on the event loop after each change."""
        self._listeners.append(listener)

    def shortcoming(self) -> str:
        """What does not work, and why; "" if nothing."""
        if not self._problem:
            return ""
        state = "may be outdated" if self.installed is not None else "is unknown"
        return f"the list of installed gang schedulers {state}: {self._problem}"

    async def run(self) -> NoReturn:
        """Poll until cancelled, or until `poll` raises ConfigError."""
        while True:
            await self.poll()
            await self._sleep(INTERVAL)

    async def poll(self) -> None:
        """Send one request. Does not raise for errors of the server.

        Raises ConfigError if the CRDs are of another controller.
        """
        previous = self._problem
        try:
            self._resources = await self._fetch_resources()
            installed = Installed(
                resources=self._resources, topologies=await self._fetch_topologies()
            )
        except (ApiError, Disconnected) as error:
            self._problem = f"cannot discover the APIs of the cluster: {error}"
            if previous != self._problem:
                log.warning(self.shortcoming())
        else:
            self._problem = ""
            if installed != self.installed:
                self._update(installed)
        finally:
            self.first_poll.set()

    async def _fetch_resources(self) -> frozenset[tuple[str, str]]:
        """Return the served resources of the known schedulers."""
        headers = {"Accept": ACCEPT} | ({"If-None-Match": self._etag} if self._etag else {})
        try:
            answer = await self._transport.request("GET", "/apis", headers=headers)
        except ApiError as error:
            if error.status == 304:
                return self._resources
            raise
        document = answer.read(_read_document)
        _check_own(document)
        self._etag = answer.etag
        return frozenset(
            (f"{group.metadata.name}/{version.version}", resource.resource)
            for group in document.items
            if group.metadata.name in API_GROUPS
            for version in group.versions
            for resource in version.resources
        )

    async def _fetch_topologies(self) -> tuple[str, ...]:
        """Names of KAI's few Topology objects; () if they may not be read."""
        if (KAI_TOPOLOGIES.api_version, KAI_TOPOLOGIES.plural) not in self._resources:
            return ()
        try:
            answer = await self._transport.request("GET", KAI_TOPOLOGIES.path())
        except ApiError as error:
            if error.status in (403, 404):
                return ()
            raise
        return tuple(sorted(item.metadata.name for item in answer.read(_decode_list).items))

    def _update(self, installed: Installed) -> None:
        previous = self.installed.resources if self.installed is not None else frozenset()
        self.installed = installed
        log.info(
            "gang schedulers' kinds",
            come=sorted("/".join(pair) for pair in installed.resources - previous),
            gone=sorted("/".join(pair) for pair in previous - installed.resources),
        )
        for listener in self._listeners:
            listener(installed)
