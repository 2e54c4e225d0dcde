"""The responses of the cluster that doctor checks."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from kubectl_torchrun.cluster.client import ApiError, Unreachable
from kubectl_torchrun.doctor.findings import items_at, text_at
from torchrun_api.json import JsonObject

Answer: TypeAlias = JsonObject | ApiError | Unreachable


class ClusterSnapshot(NamedTuple):
    """The responses, by name. A request that failed has its error instead."""

    namespace: str
    answers: Mapping[str, Answer]

    def read(self, name: str) -> JsonObject:
        """The response. Raises the ApiError or Unreachable of its request."""
        answer = self.answers[name]
        if isinstance(answer, ApiError | Unreachable):
            raise answer
        return answer

    def find(self, name: str) -> JsonObject | None:
        """The response, None if it is not found or was not requested. Raises other errors."""
        answer = self.answers.get(name)
        if answer is None or (isinstance(answer, ApiError) and answer.status == 404):
            return None
        return self.read(name)

    def items(self, name: str) -> list[JsonObject]:
        """The objects of a list; none if the cluster does not know their kind."""
        listed = self.find(name)
        return [] if listed is None else items_at(listed, "items")

    def is_unreadable(self, name: str) -> bool:
        """Whether the request failed, for a reason other than that nothing was found."""
        answer = self.answers.get(name)
        return isinstance(answer, Unreachable) or (
            isinstance(answer, ApiError) and answer.status != 404
        )

    def groups(self) -> frozenset[str]:
        """The API groups that the cluster serves."""
        return frozenset(
            text_at(group, "name") for group in items_at(self.read("groups"), "groups")
        )

    def queues(self) -> list[JsonObject]:
        """The queues of the namespace; none if they cannot be read: `check_queues` says so."""
        return [] if self.is_unreadable("queues") else self.items("queues")
