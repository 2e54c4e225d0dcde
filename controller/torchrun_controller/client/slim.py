"""Loaders and REST client of kubernetes_asyncio without its generated APIs and models.

`import kubernetes_asyncio` imports every API and model: 0.46 s and 37 MiB. What the controller uses
takes 0.06 s and 3 MiB, but the library imports the rest whenever one of its modules is imported. So
this module puts two empty packages into `sys.modules` meanwhile, and removes them afterwards. A
later import of the library gets all of it.
"""

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

_PACKAGES = "kubernetes_asyncio", "kubernetes_asyncio.client"


class Library(NamedTuple):
    """What the controller uses of the library."""

    configuration: "type[Configuration]"
    rest_client: "type[RESTClientObject]"
    in_cluster_loader: "type[InClusterConfigLoader]"
    load_kube_config: "Callable[..., Awaitable[KubeConfigLoader]]"


@cache
def import_library() -> Library:
    """Import it once: without the generated code if possible, else with all of it."""
    if _PACKAGES[0] not in sys.modules:
        try:
            return _import_without_models()
        except (ImportError, AttributeError):  # a release with another layout
            _remove_packages()
    return _import_parts()


def _import_without_models() -> Library:
    try:
        _, client = (_add_empty_package(name) for name in _PACKAGES)
        configuration = importlib.import_module(f"{_PACKAGES[1]}.configuration").Configuration
        # The loaders import both names, and need ApiClient only to build clients.
        vars(client).update(Configuration=configuration, ApiClient=None)
        return _import_parts()
    finally:
        _remove_packages()


def _import_parts() -> Library:
    def load(name: str) -> ModuleType:
        return importlib.import_module(f"{_PACKAGES[0]}.{name}")

    return Library(
        load("client.configuration").Configuration,
        load("client.rest").RESTClientObject,
        load("config.incluster_config").InClusterConfigLoader,
        load("config.kube_config").load_kube_config,
    )


def _add_empty_package(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(name)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return sys.modules[name]


def _remove_packages() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGES[0]]:
        del sys.modules[name]
