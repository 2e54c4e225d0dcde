"""What is installed of the gang schedulers, as far as the API server tells."""

from typing import Any

from msgspec import Struct

from torchrun_api.kinds import Kind


class Installed(Struct, frozen=True, kw_only=True):
    """The kinds of gang schedulers that the API server serves, as pairs of apiVersion and plural.

    {("scheduling.volcano.sh/v1beta1", "podgroups")}, for instance. It says that the kinds are
    there, not that a scheduler runs. `topologies` are the names of KAI's Topology objects.
    """

    resources: frozenset[tuple[str, str]] = frozenset()
    topologies: tuple[str, ...] = ()

    def serves(self, kind: Kind[Any]) -> bool:
        """Whether objects of this kind, in this version, can be made."""
        return (kind.api_version, kind.plural) in self.resources
