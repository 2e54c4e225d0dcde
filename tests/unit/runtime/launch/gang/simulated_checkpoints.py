"""What the ranks of a simulated gang save, and whether they resume from the right checkpoint."""

from random import Random

from torchrun_runtime.launch.gang.checkpoints import KEPT, KEPT_SAVES, CompleteCheckpoint, Saved

Round = tuple[str | None, int]
AHEAD = KEPT_SAVES - KEPT  # how many saves a rank may be ahead of another one
TIME = "2026-01-01T00:00:00.{:06}Z"


class SimulatedStorage:
    """The checkpoints as they are, while the leader knows what arrives. One rank on each node.

    Some are not seen by all nodes. violations: gets a line for each wrong start.
    """

    def __init__(self, size: int, random: Random, violations: list[str]) -> None:
        self.resumed = self.skipped = 0  # rounds with a checkpoint, and without the newest one
        self._size = size
        self._random = random
        self._violations = violations
        self._rounds: dict[Round, CompleteCheckpoint | None] = {}  # in the order of their starts
        self._steps: dict[tuple[Round, int], int] = {}  # the newest of a node in a round
        self._places: dict[str, tuple[int, int]] = {}  # of a path: round and step, which order them
        self._savers: dict[str, set[int]] = {}
        self._blind: dict[str, int | None] = {}  # the node that does not see a path

    def start(self, node: int, own: Round, checkpoint: CompleteCheckpoint | None) -> None:
        """Check what a node resumes from."""
        if own in self._rounds:
            if self._rounds[own] != checkpoint:
                self._violations.append(f"{own}: node {node} resumes from another checkpoint")
            return
        self._rounds[own] = checkpoint
        path = checkpoint.path if checkpoint else None
        complete = [each for each, nodes in self._savers.items() if len(nodes) == self._size]
        newest = sorted(complete, key=lambda each: self._places[each], reverse=True)[:KEPT]
        visible = [each for each in newest if self._blind[each] is None]
        if path is not None and path not in complete:
            self._violations.append(f"{own} resumes from {path}, which is not complete")
        elif path != next(iter(visible), None):
            self._violations.append(f"{own} resumes from {path} instead of {visible}, of {newest}")
        self.resumed += path is not None
        self.skipped += path is not None and path not in newest[:1]

    def save(self, node: int, own: Round, before: tuple[Saved, ...]) -> tuple[Saved, ...]:
        """Save the next step, unless the others are behind; what the node has saved last."""
        steps = [self._steps.get((own, other), 0) for other in range(self._size)]
        step = steps[node] + 1
        if step > min(steps) + AHEAD:
            return before
        self._steps[own, node] = step
        path = f"/{own[0]}/{own[1]}/{step}"
        self._places[path] = list(self._rounds).index(own), step
        savers = self._savers.setdefault(path, set())
        savers.add(node)
        hidden = self._random.random() < 0.3
        self._blind.setdefault(path, self._random.randrange(self._size) if hidden else None)
        saved = Saved(step, self._size, (node,))
        if node == 0:
            is_complete = self._random.random() < 0.2
            savers.update(range(self._size) if is_complete else ())
            time = TIME.format(self._random.randrange(10))  # of a clock that goes back
            saved = Saved(step, self._size, (node,), path, time, is_complete)
        return (*before, saved)[-KEPT_SAVES:]

    def find_missing(
        self, node: int, candidates: tuple[CompleteCheckpoint, ...]
    ) -> tuple[int, ...]:
        """The places of the candidates that a node does not see."""
        return tuple(n for n, each in enumerate(candidates) if self._blind[each.path] == node)

    def inherit(self, known: tuple[CompleteCheckpoint, ...]) -> None:
        """Keep what the controller knows after a suspension. The old ranks are gone."""
        paths = {each.path for each in known}
        self._savers = {path: nodes for path, nodes in self._savers.items() if path in paths}
