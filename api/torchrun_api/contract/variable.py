"""The type of environment variables of pods. `launch` and `sync` declare them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from torchrun_api.json import JsonObject

T = TypeVar("T")


@dataclass(frozen=True)
class Type(Generic[T]):
    """name: in the reference. encode: turns a value into the text of the variable."""

    name: str
    encode: Callable[[T], str]


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


TEXT = Type[str]("text", str)
PATH = Type[str]("path", str)
URL = Type[str]("URL", str)
SHA256 = Type[str]("SHA-256", str)  # 64 hexadecimal digits
COUNT = Type[int]("integer", str)
SECONDS = Type[int]("seconds", str)
JSON = Type[object]("JSON", _encode_json)


# Programs and people that set or read a variable.
CONTROLLER = "controller"
LAUNCHER = "launcher"
RANK = "rank modules"  # modules that the launcher adds to PYTHONPATH of the ranks
SDK = "SDK"
SERVE = "serve pod"
SYNC = "sync pod"
TESTS = "tests"
TORCHRUN = "torchrun"
USER = "user"  # sets it in spec.env, reads it in the command


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. default: the value for readers if the variable is not set."""

    name: str
    type: Type[T]
    read_by: tuple[str, ...]
    meaning: str
    set_by: tuple[str, ...] = (CONTROLLER,)
    default: str = ""

    def env_var(self, value: T | None) -> JsonObject | None:
        """The v1 EnvVar of a value; None for None."""
        if value is None:
            return None
        return {"name": self.name, "value": literal(self.type.encode(value))}

    def env_var_unless_default(self, value: T) -> JsonObject | None:
        """The v1 EnvVar of a value; None for the default, which all readers know."""
        return None if self.type.encode(value) == self.default else self.env_var(value)

    def env_var_of_field(self, path: str) -> JsonObject:
        """The v1 EnvVar of a field of the pod."""
        return {"name": self.name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    def env_var_of_request(self, resource: str) -> JsonObject:
        """The v1 EnvVar of what its container requests of a resource, in whole units."""
        reference: JsonObject = {"resource": f"requests.{resource}"}
        return {"name": self.name, "valueFrom": {"resourceFieldRef": reference}}

    def env_var_of_secret(self, name: str, key: str) -> JsonObject:
        """The v1 EnvVar of an entry of a Secret. The container does not start without it."""
        reference: JsonObject = {"name": name, "key": key}
        return {"name": self.name, "valueFrom": {"secretKeyRef": reference}}

    def read(self, environment: Mapping[str, str]) -> str:
        """The text in the environment, or the default."""
        return environment.get(self.name, self.default)


def literal(text: str) -> str:
    """The value of a v1 EnvVar that a container gets as `text`.

    The kubelet replaces `$(NAME)` and `$$` in values
    (https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/).
    """
    return text.replace("$", "$$")


def env_vars(*variables: JsonObject | None) -> list[JsonObject]:
    """The v1 EnvVars in this order, without None."""
    return [variable for variable in variables if variable is not None]
