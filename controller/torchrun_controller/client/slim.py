"""The kubeconfig reader of kubernetes_asyncio without its generated client.

`import kubernetes_asyncio` imports every API and model: 0.46 s and 37 MiB. The reader alone takes
0.05 s and 3 MiB, but no public module of the library has it without the models. So this module
puts two empty packages into `sys.modules` while it imports the reader, and removes them afterwards.
A later import of the library gets all of it. Only processes with a kubeconfig use this: a pod has a
service account.
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
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

_PACKAGES = "kubernetes_asyncio", "kubernetes_asyncio.client"


class KubeconfigReader(NamedTuple):
    """The class and the function of the library that reading a kubeconfig needs."""

    configuration: "type[Configuration]"
    load_kube_config: "Callable[..., Awaitable[KubeConfigLoader]]"


@cache
def import_reader() -> KubeconfigReader:
    """Import the reader once: without the generated client if possible, else with all of it."""
    if _PACKAGES[0] not in sys.modules:
        try:
            return _import_without_client()
        except (ImportError, AttributeError):  # a release with another layout
            _remove_packages()
    from kubernetes_asyncio import client, config

    return KubeconfigReader(client.Configuration, config.load_kube_config)


def _import_without_client() -> KubeconfigReader:
    try:
        _, client = (_add_empty_package(name) for name in _PACKAGES)
        configuration = importlib.import_module(f"{_PACKAGES[1]}.configuration").Configuration
        # The reader imports both names, and needs ApiClient only to build clients.
        vars(client).update(Configuration=configuration, ApiClient=None)
        reader = importlib.import_module(f"{_PACKAGES[0]}.config.kube_config")
        return KubeconfigReader(configuration, reader.load_kube_config)
    finally:
        _remove_packages()


def _add_empty_package(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(name)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return sys.modules[name]


def _remove_packages() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGES[0]]:
        del sys.modules[name]
