"""Decoding of frames and pages, and what remains of invalid ones."""

import json
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import malformed
from frames import bookmark, error, frame, page, pod
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_controller.cache.observe import by_parent, by_queue, by_unfenced_node
from torchrun_controller.cache.store import Store
from torchrun_controller.watch.codec import (
    Bookmark,
    Codec,
    NotAList,
    ServerError,
    Versions,
    identity_of,
    read_versions,
)
from torchrun_controller.watch.events import Deleted, Faulted, Upserted
from torchrun_controller.watch.sharing import frees_interned_strings

PODS = Codec(Pod)
JOBS = Codec(TorchrunJob)


def job(spec: object, **more: object) -> JsonObject:
    metadata = {"name": "run", "namespace": "team-a", "resourceVersion": "7", "uid": "u"}
    return {"metadata": metadata, "spec": spec, **more}


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED"])
def test_an_object(kind: str) -> None:
    event = PODS.frame(frame(kind, pod("a", 5, spec={"nodeName": "n1"})))
    assert isinstance(event, Upserted)
    assert (event.resource_version, event.object.metadata.name) == (5, "a")
    assert event.object.spec.node_name == "n1"


def test_a_deletion_needs_no_more_than_the_name() -> None:
    obj = pod("a", 6, status={"phase": "a phase that nobody knows"})
    assert PODS.frame(frame("DELETED", obj)) == Deleted(("team-a", "a"), 6)


@pytest.mark.parametrize("end", [True, False])
def test_a_bookmark(end: bool) -> None:
    assert PODS.frame(bookmark(9, end=end)) == Bookmark(9, end)


def test_an_error() -> None:
    assert PODS.frame(error(410, "Expired", "too old")) == ServerError(
        410, "Expired", "too old", None
    )
    assert PODS.frame(error(429, "TooManyRequests", "busy", 3)) == ServerError(
        429, "TooManyRequests", "busy", 3.0
    )


@pytest.mark.parametrize(("asked", "seconds"), [(10**400, 600.0), (-(10**400), None)])
def test_an_out_of_range_retry_after_is_limited(asked: int, seconds: float | None) -> None:
    busy = PODS.frame(error(429, "TooManyRequests", "busy", asked))
    assert busy == ServerError(429, "TooManyRequests", "busy", seconds)


def test_type_may_come_after_object() -> None:
    line = json.dumps({"object": pod("a", 5), "type": "ADDED"}).encode()
    assert isinstance(PODS.frame(line), Upserted)


@pytest.mark.parametrize(
    "line",
    [
        frame("ADDED", pod("a", 5, status={"phase": "a phase that nobody knows"})),
        frame("SOMETHING", pod("a", 5)),
        frame("DELETED", pod("a", 5)).replace(b'"5"', b'"five"'),
        frame("ADDED", pod("a", 5)).replace(b'"5"', b'"five"'),
        frame("ADDED", pod("a", 5))[:-9],
        frame("ADDED", pod("a", 5)).replace(b"train", b"\xff\xfe"),
        frame("ADDED", pod("a", 5, spec={"x": None})).replace(b"null", b"[" * 100_000),
    ],
    ids=["field", "type", "deletion", "version", "truncated", "utf-8", "nesting"],
)
def test_an_undecodable_object_is_named(line: bytes) -> None:
    fault = PODS.frame(line)
    assert isinstance(fault, Faulted)
    assert fault.key == ("team-a", "a")
    assert fault.message


def test_a_fault_has_the_path_of_the_field() -> None:
    fault = PODS.frame(frame("ADDED", pod("a", 5, spec={"nodeName": 3})))
    assert fault == Faulted(("team-a", "a"), "Expected `str`, got `int` - at `$.spec.nodeName`")


def test_an_invalid_resource_version_is_reported() -> None:
    fault = PODS.frame(frame("ADDED", pod("a", 5)).replace(b'"5"', b'"five"'))
    assert fault == Faulted(("team-a", "a"), "metadata.resourceVersion 'five' is not a number")


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_a_fault(line: bytes) -> None:
    assert isinstance(PODS.frame(line), Faulted)
    with pytest.raises(NotAList):
        PODS.page(line)


WORKER = pod(
    "train-0-abcde",
    5,
    spec={"nodeName": "n1", "containers": [{"name": "trainer", "image": "a:1"}]},
    status={"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}]},
)
RUNNING = job(
    {
        "numNodes": 2,
        "command": ["python", "train.py"],
        "elastic": {"minNodes": 1, "maxNodes": 4},
        "volumes": {"workspace": {"source": "git", "url": "https://git.example/a.git"}},
        "dependsOn": [{"name": "first"}],
    },
    status={
        "phase": "Running",
        "attempt": 1,
        "conditions": [{"type": "Running", "status": "True", "reason": "WorkersRunning"}],
        "attempts": [{"number": 0, "reason": "ExitCode", "counted": True}],
        "unfenced": [{"attempt": 0, "index": 1, "node": "n1", "since": "2026-01-02T03:04:05Z"}],
    },
)


@settings(deadline=None, max_examples=300)
@given(malformed.texts({"type": "ADDED", "object": WORKER}))
def test_a_malformed_pod_decodes_or_is_a_fault(line: bytes) -> None:
    PODS.frame(line)


@settings(deadline=None, max_examples=300)
@given(malformed.texts({"type": "MODIFIED", "object": RUNNING}))
def test_a_malformed_job_can_be_indexed_and_written(line: bytes) -> None:
    event = JOBS.frame(line)
    if isinstance(event, Upserted):
        store: Store[TorchrunJob] = Store(
            {"queue": by_queue, "parent": by_parent, "node": by_unfenced_node}
        )
        store.upsert(event.object, event.resource_version)
        msgspec.json.encode(event.object.status)


@settings(deadline=None, max_examples=300)
@given(malformed.texts({"metadata": {"resourceVersion": "7"}, "items": [WORKER, WORKER]}))
def test_a_malformed_page_is_read_or_refused(body: bytes) -> None:
    try:
        PODS.page(body)
    except NotAList:
        return


class TestSpecThatDoesNotDecode:
    """The object stays in the store with the fault, so that a condition can report it."""

    def test_keeps_metadata_and_status(self) -> None:
        event = JOBS.frame(frame("ADDED", job({"command": 5}, status={"phase": "Running"})))
        assert isinstance(event, Upserted)
        assert event.object.metadata.name == "run"
        assert event.object.status.phase == "Running"
        assert event.object.spec == TorchrunJob().spec
        assert "$.spec.command" in event.object.invalid

    @pytest.mark.parametrize(
        "field", ["attempt", "restarts", "runningSeconds", "workspaceRevision"]
    )
    @pytest.mark.parametrize("number", [-1, 2**63 - 1])
    def test_drops_a_status_beyond_its_limits(self, field: str, number: int) -> None:
        event = JOBS.frame(frame("ADDED", job({}, status={field: number})))
        assert isinstance(event, Upserted)
        assert f"$.status.{field}" in event.object.invalid

    def test_drops_a_status_that_does_not_decode(self) -> None:
        event = JOBS.frame(frame("ADDED", job({"command": 5}, status={"attempt": "x"})))
        assert isinstance(event, Upserted)
        assert event.object.status == TorchrunJob().status
        assert "$.spec.command" in event.object.invalid

    def test_names_the_status_if_it_is_the_fault(self) -> None:
        event = JOBS.frame(frame("ADDED", job({"command": "x"}, status={"attempt": "x"})))
        assert isinstance(event, Upserted)
        assert "$.status.attempt" in event.object.invalid

    def test_without_legible_metadata_is_a_fault(self) -> None:
        line = frame("ADDED", {**job({"command": 5}), "metadata": {"name": "run", "labels": 3}})
        assert isinstance(JOBS.frame(line), Faulted)

    def test_invalid_queues_stay_as_well(self) -> None:
        event = Codec(TorchrunQueue).frame(frame("ADDED", job({"nodeResources": "many"})))
        assert isinstance(event, Upserted)
        assert "$.spec.nodeResources" in event.object.invalid

    def test_the_fault_is_not_encoded(self) -> None:
        assert b"invalid" not in msgspec.json.encode(TorchrunJob())


def test_a_page() -> None:
    got = PODS.page(page([pod("a", 3), pod("b", 4)], 9, token="more"))
    assert [obj.metadata.name for obj in got.objects] == ["a", "b"]
    assert (got.resource_version, got.next, got.faults) == (9, "more", [])


def test_a_page_without_items() -> None:
    assert PODS.page(b'{"metadata":{"resourceVersion":"9"},"items":null}').objects == []


def test_one_bad_object_of_a_page_does_not_affect_others() -> None:
    bad = pod("b", 4, status={"phase": "a phase that nobody knows"})
    got = PODS.page(page([pod("a", 3), bad, pod("c", 5)], 9))
    assert [obj.metadata.name for obj in got.objects] == ["a", "c"]
    assert [fault.key for fault in got.faults] == [("team-a", "b")]


def test_a_page_of_jobs_keeps_the_invalid_one() -> None:
    got = JOBS.page(page([job({"command": 5})], 9))
    assert "$.spec.command" in got.objects[0].invalid
    assert got.faults == []


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Please log in</html>",
        b'{"kind":"Status","metadata":{},"code":200}',
        page([pod("a", 3)], 9)[:-5],
        page([], 9).replace(b'"9"', b'"nine"'),
        b"",
    ],
    ids=["html", "status", "truncated", "version", "empty"],
)
def test_an_invalid_page(body: bytes) -> None:
    with pytest.raises(NotAList):
        PODS.page(body)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"type":"ADDED","object":{"metadata":{"name":"a","namespace":"n","x":"', ("n", "a")),
        (b'{"type":"ADDED","object":{"metadata":{"name":"a","generateName":"g', ("", "a")),
        (b'{"type":"ADDED"', ("", "")),
    ],
)
def test_the_identity_is_read_from_broken_json(text: bytes, key: tuple[str, str]) -> None:
    assert identity_of(text) == key


def test_repeated_strings_are_shared() -> None:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u-1"}
    conditions = {"conditions": [{"type": "Ready", "status": "True"}]}

    def worker(number: int) -> Pod:
        obj = pod(f"train-{number}", number, spec={"nodeName": "node-1"}, status=conditions)
        obj["metadata"]["ownerReferences"] = [owner]
        event = PODS.frame(frame("ADDED", obj))
        assert isinstance(event, Upserted)
        return event.object

    one, other = worker(1), worker(2)
    assert one.metadata.owner_references is other.metadata.owner_references
    shares = frees_interned_strings(sys.version_info[:3])
    assert (one.metadata.namespace is other.metadata.namespace) is shares
    assert (one.metadata.labels.torchrun_job is other.metadata.labels.torchrun_job) is shares
    assert (one.spec.node_name is other.spec.node_name) is shares
    assert (one.status.conditions[0].type is other.status.conditions[0].type) is shares


def test_versions_of_a_page_of_metadata() -> None:
    items = [{"metadata": {"resourceVersion": version}} for version in ("5", "17", "6")]
    body = {"metadata": {"resourceVersion": "40", "continue": "token"}, "items": items}
    assert read_versions(json.dumps(body).encode()) == Versions(17, "token")
    empty = {"metadata": {"resourceVersion": "40"}, "items": None}
    assert read_versions(json.dumps(empty).encode()) == Versions(0, "")
    for wrong in ({"metadata": {"resourceVersion": "40"}}, {**body, "items": [{"metadata": {}}]}):
        with pytest.raises(ValueError, match=r"items|resourceVersion"):
            read_versions(json.dumps(wrong).encode())
