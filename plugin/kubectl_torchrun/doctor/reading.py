"""Reads the snapshot: one request for each path, all of a step at the same time."""

from collections.abc import Awaitable, Mapping

import anyio

from kubectl_torchrun.cluster.client import Api, ApiError, Unreachable
from kubectl_torchrun.cluster.slices import QUEUES
from kubectl_torchrun.doctor.constraints import (
    CONSTRAINTS,
    GROUP,
    constraints_key,
    service_accounts,
)
from kubectl_torchrun.doctor.findings import CONTROLLER_QUERY, DEPLOYMENTS, field_at
from kubectl_torchrun.doctor.snapshot import Answer, ClusterSnapshot
from kubectl_torchrun.doctor.webhooks import endpoints_key, webhook_services
from torchrun_api.json import JsonObject

_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
# By the name under which a check reads the response.
_PATHS: Mapping[str, str] = {
    "groups": "/apis",
    "torchrun": "/apis/torchrun.ai",
    "kinds": "/apis/torchrun.ai/v1alpha1",
    "nodes": "/api/v1/nodes",
    "storageclasses": "/apis/storage.k8s.io/v1/storageclasses",
    "daemonsets": "/apis/apps/v1/daemonsets",
    "namespace": "/api/v1/namespaces/{namespace}",
    "resourcequotas": "/api/v1/namespaces/{namespace}/resourcequotas",
    "limitranges": "/api/v1/namespaces/{namespace}/limitranges",
    "validatingwebhooks": f"{_ADMISSION}/validatingwebhookconfigurations",
    "mutatingwebhooks": f"{_ADMISSION}/mutatingwebhookconfigurations",
    "cluster-autoscaler": "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status",
    # Missing on clusters other than OpenShift.
    "openshift-autoscalers": "/apis/autoscaling.openshift.io/v1/clusterautoscalers",
}
_REVIEWS = "/apis/authorization.k8s.io/v1/namespaces/{}/localsubjectaccessreviews"
_ENDPOINTS = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
_MOST_SERVICES = 32  # of webhooks; one request for each


async def read_snapshot(api: Api) -> ClusterSnapshot:
    """Read everything, in two steps. A request that fails costs its own response only.

    Raises Unreachable and ApiError if not even the version can be read.
    """
    answers: dict[str, Answer] = {"version": await api.read("/version")}
    requests: dict[str, Awaitable[JsonObject]] = {
        name: api.read(path.replace("{namespace}", api.namespace)) for name, path in _PATHS.items()
    }
    requests["queues"] = api.read(QUEUES.path(api.namespace))
    requests["deployments"] = api.read(DEPLOYMENTS, CONTROLLER_QUERY)
    await _collect(answers, requests)
    first = ClusterSnapshot(api.namespace, answers)
    more: dict[str, Awaitable[JsonObject]] = {
        endpoints_key(namespace, service): api.read(
            _ENDPOINTS.format(namespace),
            {"labelSelector": f"kubernetes.io/service-name={service}"},
        )
        for namespace, service in webhook_services(first)[:_MOST_SERVICES]
    }
    if not first.is_unreadable("groups") and GROUP in first.groups():
        more |= {
            constraints_key(account): _usable_constraints(api, account)
            for account in service_accounts(first)
        }
    await _collect(answers, more)
    return first


async def _collect(
    answers: dict[str, Answer], requests: Mapping[str, Awaitable[JsonObject]]
) -> None:
    async def fill(name: str, request: Awaitable[JsonObject]) -> None:
        try:
            answers[name] = await request
        except (ApiError, Unreachable) as error:
            answers[name] = error

    async with anyio.create_task_group() as tasks:
        for name, request in requests.items():
            tasks.start_soon(fill, name, request)


async def _usable_constraints(api: Api, account: str) -> JsonObject:
    """The security context constraints that a service account of the namespace may use."""
    usable: list[str] = []
    for constraint in CONSTRAINTS:
        attributes: JsonObject = {
            "namespace": api.namespace,
            "group": GROUP,
            "resource": "securitycontextconstraints",
            "name": constraint,
            "verb": "use",
        }
        body: JsonObject = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "LocalSubjectAccessReview",
            "metadata": {"namespace": api.namespace},
            "spec": {
                "resourceAttributes": attributes,
                "user": f"system:serviceaccount:{api.namespace}:{account}",
                "groups": [
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{api.namespace}",
                    "system:authenticated",
                ],
            },
        }
        answer = await api.ask(_REVIEWS.format(api.namespace), body)
        if field_at(answer, "status", "allowed") is True:
            usable.append(constraint)
    return {"constraints": list(usable)}
