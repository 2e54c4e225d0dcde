"""The history of objects: every state from a watch, in order."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import httpx
import msgspec

from bodies import Body
from gates import may_train
from torchrun_api import names
from torchrun_api.kinds.resources import Kind

T = TypeVar("T")
RETRY_SECONDS = 0.2
SILENCE_SECONDS = 60.0


class History:
    """Records the states of all objects of one kind in one namespace.

    After a restart of the API server it lists again. It may miss states during the restart, but no
    object that exists before or after.
    """

    def __init__(self, api: httpx.Client, kind: Kind[Any], namespace: str) -> None:
        self._api = api
        self._path = kind.path(namespace)
        self._states: list[Body] = []
        # UID and version of the last state of each deleted object.
        self._deleted: set[tuple[str, str]] = set()
        self._versions: set[tuple[str, str]] = set()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=f"history of {self._path}")

    @contextmanager
    def running(self) -> Iterator["History"]:
        """Record until the end of the block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._hang_up()
            self._thread.join()

    def states(self, name: str = "") -> list[Body]:
        """All states so far, or those of one object."""
        with self._changed:
            return [s for s in self._states if name in ("", s["metadata"]["name"])]

    def is_last(self, state: Body) -> bool:
        """Whether the object was deleted in this state, and not created again."""
        return (state["metadata"]["uid"], state["metadata"]["resourceVersion"]) in self._deleted

    def uids(self) -> dict[str, set[str]]:
        """UIDs of all objects that ever existed, by name."""
        uids: dict[str, set[str]] = {}
        for state in self.states():
            uids.setdefault(state["metadata"]["name"], set()).add(state["metadata"]["uid"])
        return uids

    def phases(self, name: str, last: str) -> list[str]:
        """Wait for the last phase of an object. Return its phases in order, without repetitions.

        A program that has seen a phase may be ahead of this watch.
        """
        self.until(lambda state: state.get("status", {}).get("phase") == last, name=name)
        phases = [state.get("status", {}).get("phase", "") for state in self.states(name)]
        return [p for p, before in zip(phases, [None, *phases], strict=False) if p and p != before]

    def until(self, holds: Callable[[Body], T | None], seconds: float = 300, name: str = "") -> T:
        """Wait for a state, past or new, for which `holds` returns a value. Returns that value."""
        deadline, looked_at = time.monotonic() + seconds, 0
        with self._changed:
            while True:
                for state in self._states[looked_at:]:
                    if name in ("", state["metadata"]["name"]) and (result := holds(state)):
                        return result
                looked_at = len(self._states)
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    last = [(s["metadata"]["name"], s.get("status")) for s in self._states[-3:]]
                    raise AssertionError(
                        f"not seen in {self._path} within {seconds:.0f} s; last: {last}"
                    )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._list_and_watch()
            except (httpx.HTTPError, msgspec.DecodeError):
                self._stop.wait(RETRY_SECONDS)

    def _list_and_watch(self) -> None:
        listed = self._api.get(self._path).raise_for_status().json()
        self._list(listed["items"])
        query = {
            "watch": "true",
            "resourceVersion": listed["metadata"]["resourceVersion"],
            "timeoutSeconds": "600",
        }
        timeout = httpx.Timeout(SILENCE_SECONDS)
        version = query["resourceVersion"]
        while not self._stop.is_set():
            query["resourceVersion"] = version
            try:
                with self._api.stream("GET", self._path, params=query, timeout=timeout) as answer:
                    answer.raise_for_status()
                    stream = answer.extensions["network_stream"]
                    self._connection = stream.get_extra_info("socket")
                    if self._stop.is_set():
                        return
                    for line in answer.iter_lines():
                        event = msgspec.json.decode(line)
                        if event["type"] == "ERROR":
                            return
                        self._add(event["object"], deleted=event["type"] == "DELETED")
                        version = event["object"]["metadata"]["resourceVersion"]
            except httpx.ReadTimeout:
                continue

    def _hang_up(self) -> None:
        """Cancel a read that waits for a change."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _list(self, items: list[Body]) -> None:
        for item in items:
            self._add(item)

    def _add(self, state: Body, *, deleted: bool = False) -> None:
        meta = state["metadata"]
        with self._changed:
            if deleted:
                self._deleted.add((meta["uid"], meta["resourceVersion"]))
            if (meta["uid"], meta["resourceVersion"]) in self._versions:
                return
            self._versions.add((meta["uid"], meta["resourceVersion"]))
            self._states.append(state)
            self._changed.notify_all()


def trains(state: Body, pods: Iterable[Body]) -> bool:
    """Whether ranks of this pod may run. `pods`: the latest states, with the leader of its gang."""
    return state["status"].get("phase") == "Running" and may_train(state, pods)


def assert_gangs_never_overlap(pods: History) -> None:
    """Check that ranks of two attempts never ran at the same time."""
    latest: dict[str, Body] = {}
    for state in pods.states():
        labels = state["metadata"].get("labels", {})
        if labels.get(names.COMPONENT_LABEL) != names.WORKER:
            continue
        latest[state["metadata"]["name"]] = state
        live = {
            name: pod["metadata"]["labels"][names.ATTEMPT_LABEL]
            for name, pod in latest.items()
            if trains(pod, latest.values())
        }
        assert len(set(live.values())) <= 1, f"two gangs at once: {live}"
