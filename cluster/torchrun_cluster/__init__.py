"""A Kubernetes cluster from nothing, for demos and tests.

    with LocalCluster(name="mine", size=Size.CONTROL_PLANE) as cluster:
        cluster.kubectl("get", "namespaces")

Standard library only: it runs before any virtual environment exists.
"""

from .errors import ClusterError
from .local import LocalCluster
from .state import Size

__all__ = ["ClusterError", "LocalCluster", "Size"]
