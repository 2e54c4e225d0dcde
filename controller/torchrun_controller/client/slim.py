"""The kubeconfig reader of kubernetes_asyncio without its generated client.

`import kubernetes_asyncio` imports every API and model: 0.46 s and 37 MiB; the reader alone takes
0.05 s and 3 MiB. No public module of the library has the reader without the models. So its two
packages are empty while the reader is imported and are removed afterwards; a later import of the
library gets all of it. Only processes with a kubeconfig use this: a pod has a service account.
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


class Reading(NamedTuple):
    """The two names that reading a kubeconfig needs."""

    configuration: "type[Configuration]"
    load_kube_config: "Callable[..., Awaitable[KubeConfigLoader]]"


@cache
def reading() -> Reading:
    """Import the reader once: alone if possible, else with the whole library."""
    if _PACKAGES[0] not in sys.modules:
        try:
            return _alone()
        except (ImportError, AttributeError):  # a release with another layout
            _forget()
    from kubernetes_asyncio import client, config

    return Reading(client.Configuration, config.load_kube_config)


def _alone() -> Reading:
    try:
        _, client = (_empty(name) for name in _PACKAGES)
        configuration = importlib.import_module(f"{_PACKAGES[1]}.configuration").Configuration
        # The reader imports both names, and needs ApiClient only to build clients.
        vars(client).update(Configuration=configuration, ApiClient=None)
        reader = importlib.import_module(f"{_PACKAGES[0]}.config.kube_config")
        return Reading(configuration, reader.load_kube_config)
    finally:
        _forget()


def _empty(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(name)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return sys.modules[name]


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGES[0]]:
        del sys.modules[name]
