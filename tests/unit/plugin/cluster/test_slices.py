"""An invalid object of the cluster causes a message, and does not affect other objects."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kubectl_torchrun.cluster import slices
from kubectl_torchrun.cluster.client import Unreachable, Unreadable, _object, _one_by_one
from kubectl_torchrun.cluster.job_list import job_table
from kubectl_torchrun.cluster.queue_list import queue_table, waiting_table
from kubectl_torchrun.cluster.slices import JOBS, PODS, QUEUES, Listed
from kubectl_torchrun.cluster.summary import status_lines
from kubectl_torchrun.logs.status_view import view
from kubectl_torchrun.text import escape
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.kind import Kind

from ..laptop import Laptop

HELLO = "2026-01-01T00:00:00.000000000Z hello\n"
BAD = {"phase": "Failed", "attempts": [{"number": "first"}]}

words = st.text(max_size=6) | st.sampled_from(["Running", "True", "Admitted", "4", "1e999", "x"])
numbers = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
times = st.sampled_from(
    ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00", "0001-01-01T00:00:00+14:00"]
)


anything = st.none() | st.booleans() | numbers | words | times
anything = anything | st.lists(anything, max_size=2) | st.dictionaries(words, anything, max_size=2)


def shapes(kind: Any) -> st.SearchStrategy[Any]:
    """Valid bodies of a struct, with unusual values."""
    listed = msgspec.structs.fields(kind)
    fields = {each.encode_name: _of(msgspec.inspect.type_info(each.type)) for each in listed}
    needed = {each.encode_name for each in listed if each.required}
    return st.fixed_dictionaries(
        {name: fields[name] for name in needed},
        optional={name: fields[name] for name in fields if name not in needed},
    )


@st.composite
def broken(draw: st.DrawFn, kind: Any) -> Any:
    """The same with one value replaced."""
    body = part = draw(shapes(kind))
    while part and isinstance(part, dict):
        name = draw(st.sampled_from(sorted(part)))
        if draw(st.booleans()) or not isinstance(part[name], dict):
            part[name] = draw(anything)
            break
        part = part[name]
    return body


def _of(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.StructType(cls=kind):
            return shapes(kind)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=2)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*(_of(each) for each in types))
        case msgspec.inspect.DateTimeType():
            return times
        case msgspec.inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case msgspec.inspect.FloatType():
            return numbers
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case msgspec.inspect.DictType():
            return st.dictionaries(words, words, max_size=2)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case _:
            return words


def read(kind: Kind[Any], bodies: list[Any]) -> Listed[Any]:
    answer = json.dumps({"items": bodies}).encode()
    listed = _one_by_one(msgspec.json.decode(answer, type=Listed[msgspec.Raw]), kind)
    assert len(listed.items) + len(listed.unreadable) == len(bodies)
    return listed


def show(
    jobs: Sequence[slices.JobSlice], pods: Sequence[Pod], queues: Sequence[slices.QueueSlice]
) -> None:
    shown = [*job_table(jobs, True, 80), *waiting_table(jobs, True, None)]
    shown += queue_table(queues, jobs, True, 80)
    for job in jobs:
        shown += [*status_lines(job), *view(job, pods, 80, 24), *view(job, pods, None, None)]
    assert all("\n" not in line for line in shown)
    "\n".join(escape(line) for line in shown).encode()


@given(shapes(slices.JobSlice), st.lists(shapes(PODS.type), max_size=2), shapes(slices.QueueSlice))
@example({"metadata": {"creationTimestamp": "2026-01-01T00:00:00"}}, [], {})
def test_odd_values_are_shown(job: Any, pods: list[Any], queue: Any) -> None:
    show(read(JOBS, [job]).items, read(PODS, pods).items, read(QUEUES, [queue]).items)


@given(st.lists(broken(slices.JobSlice), max_size=3), broken(PODS.type), broken(slices.QueueSlice))
def test_broken_objects_are_shown_or_named(jobs: list[Any], pod: Any, queue: Any) -> None:
    show(read(JOBS, jobs).items, read(PODS, [pod]).items, read(QUEUES, [queue]).items)


@given(st.recursive(st.none() | numbers | words, lambda inner: st.lists(inner)))
def test_values_that_are_no_objects_are_named(body: Any) -> None:
    with pytest.raises((Unreadable, Unreachable)):
        _object(json.dumps(body).encode(), JOBS)


@pytest.mark.long
def test_an_unreadable_job_is_one_line_of_the_list(laptop: Laptop) -> None:
    laptop.job("good", status={"phase": "Running"})
    laptop.job("bad", status=BAD)
    result = laptop.run("list")
    assert result.exit_code == 0
    assert "good" in result.stdout
    assert "bad" not in result.stdout
    assert "Skipped: Cannot decode TorchrunJob bad: " in result.stderr
    assert "$.status.attempts[0].number" in result.stderr
    assert "Skipped: Cannot decode TorchrunJob bad" in laptop.run("queues").stderr
    assert "good" in laptop.run("list", "-o", "name").stdout


@pytest.mark.long
@pytest.mark.parametrize("words", [["status", "bad"], ["why", "bad"], ["logs", "bad", "-f"]])
def test_an_unreadable_job_names_the_field(laptop: Laptop, words: list[str]) -> None:
    laptop.job("bad", status=BAD)
    result = laptop.run(*words)
    assert result.exit_code == 4
    assert "Cannot decode TorchrunJob bad: " in result.stderr
    assert "older than the controller's CRDs" in result.stderr


def ends(laptop: Laptop) -> None:
    """Its pod first: `logs --follow` waits for the last lines of a pod that runs."""
    laptop.worker("run", 0, 0, HELLO, terminated={"exitCode": 0})
    laptop.job("run", status={"phase": "Succeeded"})


@pytest.mark.long
def test_an_unreadable_pod_stops_nothing(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    laptop.worker("run", 0, 0, HELLO)
    labels = {"torchrun-job-name": "run", "app.kubernetes.io/component": "worker"}
    laptop.server.put("pods", "odd", metadata={"labels": labels}, status={"phase": "Odd"})
    assert "run-r0-0" in laptop.run("status", "run", "--no-watch").stdout
    assert "hello" in laptop.run("logs", "run").stdout
    laptop.once_watched(lambda: ends(laptop))
    assert laptop.run("logs", "run", "-f").exit_code == 0


def test_unreadable_is_an_error_of_its_own() -> None:
    with pytest.raises(Unreadable, match="Cannot decode TorchrunJob x"):
        _object(json.dumps({"metadata": {"name": "x"}, "status": BAD}).encode(), JOBS)
