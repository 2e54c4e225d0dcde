"""The writes of the controller for one job, as the template of the bare client."""

from datetime import UTC, datetime

import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import JOBS, SECRETS, TORCHRUN_JOBS
from torchrun_bench import bodies
from torchrun_bench.bare import NAME, NAMESPACE, UID, Write, Writes
from torchrun_bench.bodies import QUEUE, torchrun_job
from torchrun_controller.reconcile import Apply, Defaults, Observed, Plan, reconcile

_HERE = "{namespace}", "{name}"
_AS_BARE = "?fieldManager=bare"


def decided(nodes: int = 1) -> Plan:
    """The Plan of reconcile for a new job."""
    body = torchrun_job(NAME.decode(), nodes)
    metadata = {"name": NAME.decode(), "namespace": NAMESPACE.decode(), "uid": UID.decode()}
    new = msgspec.convert({**body, "metadata": metadata}, TORCHRUN_JOBS.type)
    queue = msgspec.convert({"spec": QUEUE}, TorchrunQueue)
    now = datetime.now(UTC).replace(microsecond=0)
    return reconcile(Observed(job=new, queue=queue), now, Defaults(runtime_image="bench/none"))


def same_writes(nodes: int = 1) -> bytes:
    """The writes of the controller, one after the other: children, then the status.

    For a failed gang: the status, the deletion of the old Job, and the Job of the next attempt.
    """
    plan = decided(nodes)
    status = Write(
        TORCHRUN_JOBS.path(*_HERE, "status") + "?fieldManager=bare-status&force=true",
        _raw(
            {
                "apiVersion": TORCHRUN_JOBS.api_version,
                "kind": TORCHRUN_JOBS.kind,
                "metadata": {"name": NAME.decode(), "namespace": NAMESPACE.decode()},
                "status": plan.status,
            }
        ),
    )
    applies = [_write(apply) for apply in plan.applies]
    delete = Write(JOBS.path(*_HERE), _raw({"propagationPolicy": "Background"}), "DELETE")
    following = Write(JOBS.path(_HERE[0], f"{_HERE[1]}-r1") + _AS_BARE, _raw(_next(plan)))
    created = [[write] for write in (*applies, status)]
    return msgspec.json.encode(Writes(created, [[status], [delete], [following]]))


def only_the_job(nodes: int = 1) -> bytes:
    """Only a plain Job, by POST: the minimum of any client."""
    body = bodies.plain_job(NAME.decode(), NAMESPACE.decode(), UID.decode(), nodes)
    write = Write(JOBS.path(_HERE[0]) + "?fieldManager=post", _raw(body), "POST")
    return msgspec.json.encode(Writes([[write]]))


def _write(apply: Apply) -> Write:
    """A server-side apply; of a Secret a POST with its random key, as by `client.apply`."""
    if apply.kind is SECRETS:
        body = {**apply.body, "stringData": {names.GANG_KEY: "0" * 64}}
        return Write(apply.kind.path(_HERE[0]) + _AS_BARE, _raw(body), "POST")
    return Write(apply.kind.path(*_HERE) + _AS_BARE, _raw(apply.body))


def _job(plan: Plan) -> JsonObject:
    return next(apply.body for apply in plan.applies if apply.kind == JOBS)


def _next(plan: Plan) -> JsonObject:
    """The Job of the next attempt, with another name and the attempt number on its pods."""
    text = msgspec.json.encode(_job(plan))
    text = text.replace(b'"torchrun.ai/attempt":"0"', b'"torchrun.ai/attempt":"1"')
    body = msgspec.json.decode(text, type=JsonObject)
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    metadata["name"] = f"{NAME.decode()}-r1"
    return body


def _raw(body: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(body))
