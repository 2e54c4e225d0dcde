"""Which gang schedulers are installed, by the resources that the API server serves."""

from typing import Any

from msgspec import Struct

from torchrun_api.kinds import Kind


class Installed(Struct, frozen=True, kw_only=True):
    """The kinds of gang schedulers that the API server serves, as pairs of apiVersion and plural.

    {("scheduling.volcano.sh/v1beta1", "podgroups")}, for instance. The kinds exist; whether a
    scheduler runs is not known. `topologies` are the names of KAI's Topology objects.
    """

    resources: frozenset[tuple[str, str]] = frozenset()
    topologies: tuple[str, ...] = ()

    def serves(self, kind: Kind[Any]) -> bool:
        """Whether objects of this kind and version can be created."""
        return (kind.api_version, kind.plural) in self.resources
