"""The description of a kind, without the types of any kind, so that the plugin starts faster."""

from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from torchrun_api.kinds.core import NodeMeta
from torchrun_api.kinds.meta import ChildMeta, ObjectMeta


class Object(Protocol):
    """Any object of the API in a store."""

    @property
    def metadata(self) -> ObjectMeta | ChildMeta | NodeMeta:
        """Name, namespace, UID and resourceVersion."""


T = TypeVar("T", bound=Object)


class Kind(Struct, Generic[T], frozen=True):
    """A kind: group, version and plural give its REST path, `type` the decoded fields."""

    group: str
    version: str
    plural: str
    kind: str
    type: type[T]

    @property
    def api_version(self) -> str:
        """`v1` or `group/version`, as in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """`pods` or `jobs.batch`: the name in RBAC rules, metrics and messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """REST path of one object, or of the collection; of all namespaces if none is given."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{root}{scope}/{self.plural}{tail}"
