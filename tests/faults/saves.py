"""What ranks have saved, and checks of what the controller shows and hands on of it.

A later save has a higher number, whatever clocks and steps say.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from msgspec import Struct

from faults.cluster import TORCHRUN_JOBS
from faults.store import Change, Store


class Save(Struct):
    """What the ranks of a gang have saved of one step. `job`: its UID; `ranks`: those that have."""

    number: int
    job: str
    attempt: int
    step: int
    path: str
    time: str
    world: int
    ranks: set[int]


class Saves:
    """All saves of all jobs. `report` is called with each violation."""

    def __init__(self, store: Store, report: Callable[[str], None]) -> None:
        self._report = report
        self.by_path: dict[str, Save] = {}
        self._deleted: set[str] = set()  # paths
        self._shown: defaultdict[str, list[Save]] = defaultdict(list)  # in a status, by UID
        # What a process of the controller has accepted, and whether it lives.
        self._accepted: list[tuple[Save, Callable[[], bool]]] = []
        self._stopped: set[tuple[str, int]] = set()  # gangs, by UID of the job and attempt
        store.subscribe(self._changed)

    def add(self, job: str, attempt: int, step: int, world: int, time: str) -> Save:
        """Begin to save a step, in a new directory."""
        number = len(self.by_path)
        save = Save(number, job, attempt, step, f"/{job}/{number}", time, world, set())
        self.by_path[save.path] = save
        return save

    def delete_newest(self, job: str) -> None:
        """Somebody deletes the files of the newest checkpoint that the status shows."""
        self._deleted.add(max(self._shown[job], key=lambda save: save.number).path)

    def exists(self, path: str) -> bool:
        """Whether a path exists, on every node."""
        return path in self.by_path and path not in self._deleted

    def note_report(self, paths: Iterable[str], lives: Callable[[], bool]) -> None:
        """A controller has accepted these checkpoints, and knows them while it `lives`."""
        self._accepted += [(self.by_path[path], lives) for path in paths]

    def note_stop(self, job: str, attempt: int) -> None:
        """All ranks of a gang have saved, and stop because a pod has to end."""
        self._stopped.add((job, attempt))

    def known(self, job: str) -> list[Save]:
        """The checkpoints that the controller has to know."""
        accepted = [save for save, lives in self._accepted if save.job == job and lives()]
        return [*self._shown[job], *accepted]

    def check_resumption(self, job: str, candidates: Iterable[str], chosen: str | None) -> None:
        """Check what a gang gets before its ranks start: the candidates and the one of them."""
        self._check_complete(candidates)
        newest = max((s.number for s in self.known(job) if self.exists(s.path)), default=-1)
        number = -1 if chosen is None else self.by_path[chosen].number
        if newest > number:
            self._report(f"a gang of {job} resumes from save {number} and not from {newest}")

    def _check_complete(self, paths: Iterable[str]) -> None:
        for path in paths:
            if len(self.by_path[path].ranks) < self.by_path[path].world:
                self._report(f"the checkpoint {path} counts, which is not complete")

    def _changed(self, change: Change) -> None:
        if change.resource != TORCHRUN_JOBS or change.verb == "DELETED":
            return
        uid, status = change.body["metadata"]["uid"], change.body.get("status", {})
        bodies = (status.get("lastCheckpoint"), *status.get("earlierCheckpoints", ()))
        shown = [self.by_path[body["path"]] for body in bodies if body]
        self._check_complete(save.path for save in shown)
        newest, before = (max((s.number for s in x), default=-1) for x in (shown, self._shown[uid]))
        if newest < before:
            self._report(f"{change.name} shows save {newest} after {before}")
        self._shown[uid] += [save for save in shown if save not in self._shown[uid]]
        if status.get("phase") == "Succeeded" and (uid, status.get("attempt", 0)) in self._stopped:
            self._report(f"{change.name} has succeeded by a planned stop")
