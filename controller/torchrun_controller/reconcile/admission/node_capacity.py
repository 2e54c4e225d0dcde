"""How many pods of one shape fit onto the machines in addition to what runs there.

Several pods may share a machine. The free capacity of a machine is negative if it is reserved
before the pods that use it now are gone: then nothing else fits there.
"""

from torchrun_controller.reconcile.admission.model import NodeCapacity, Workload

# How many pods fit if they request nothing, or if machines are unknown.
UNLIMITED = 1 << 30
Free = tuple[int, ...]
Placement = dict[int, int]
Items = tuple[tuple[str, str], ...]


class NodePool:
    """The machines that match one selector, by index; `members` are those that are usable."""

    def __init__(self, number: int, members: frozenset[int], matching: frozenset[int]) -> None:
        self.number = number
        self.members = members
        self.matching = matching


class PodShape:
    """Pods that request the same and may run on the same machines."""

    def __init__(self, needs: tuple[tuple[int, int], ...], pool: NodePool) -> None:
        self.needs = needs
        self.pool = pool
        self._counts: dict[Free, int] = {}

    def fit(self, free: Free) -> int:
        """Return how many of these pods fit into this free capacity."""
        count = self._counts.get(free)
        if count is None:
            count = max(0, min((free[r] // amount for r, amount in self.needs), default=UNLIMITED))
            self._counts[free] = count
        return count


class NodeIndex:
    """All machines in the order of their names, and the pod shapes of all workloads."""

    def __init__(self, nodes: tuple[NodeCapacity, ...] | None) -> None:
        self.has_nodes = nodes is not None
        self.nodes = sorted(nodes or (), key=lambda node: node.name)
        self.index = {node.name: i for i, node in enumerate(self.nodes)}
        # Not those of jobs, which may name any: each is a number on every machine.
        offered = {name for node in self.nodes for name in node.allocatable}
        self._resources = {name: i for i, name in enumerate(sorted(offered))}
        self._allocatable: list[Free] = [
            (*(node.allocatable.get(name, 0) for name in self._resources), 0) for node in self.nodes
        ]
        self._counts_of_all: dict[PodShape, int] = {}
        self._pools: dict[Items, NodePool] = {}
        self._shapes: dict[tuple[tuple[tuple[str, int], ...], Items], PodShape] = {}
        self._by_spelling: dict[tuple[object, ...], PodShape] = {}
        self._overlaps: dict[tuple[int, int], bool] = {}

    def empty(self) -> "FreeCapacity":
        """Return the capacity of the machines with no pod on them."""
        return FreeCapacity(self, list(self._allocatable))

    def capacity_of_all(self, shape: PodShape) -> int:
        """Return how many pods of the shape would fit if all machines were usable and empty."""
        count = self._counts_of_all.get(shape)
        if count is None:
            count = sum(shape.fit(self._allocatable[i]) for i in shape.pool.matching)
            self._counts_of_all[shape] = count
        return count

    def largest(self, shape: PodShape, resource: str) -> int:
        """Return the most that a machine for the shape offers of a resource, usable or not."""
        return max(
            (self.nodes[i].allocatable.get(resource, 0) for i in shape.pool.matching), default=0
        )

    def shape(self, workload: Workload) -> PodShape:
        """Return the shape of the pods of a workload: one object for all equal shapes."""
        spelling = (*workload.pod.items(), *workload.node_selector.items())
        shape = self._by_spelling.get(spelling)
        if shape is None:
            shape = self._by_spelling[spelling] = self._shape(workload)
        return shape

    def _shape(self, workload: Workload) -> PodShape:
        pod, selector = (
            tuple(sorted(workload.pod.items())),
            tuple(sorted(workload.node_selector.items())),
        )
        shape = self._shapes.get((pod, selector))
        if shape is None:
            # What no machine offers has the last place, with an amount of 0.
            none = len(self._resources)
            places = {self._resources.get(name, none): amount for name, amount in pod if amount > 0}
            needs = tuple(places.items())
            shape = self._shapes[pod, selector] = PodShape(needs, self._pool(selector))
        return shape

    def overlap(self, first: NodePool, second: NodePool) -> bool:
        """Whether two pools share machines; True if machines are unknown."""
        if first is second or not self.has_nodes:
            return True
        key = (min(first.number, second.number), max(first.number, second.number))
        overlaps = self._overlaps.get(key)
        if overlaps is None:
            overlaps = self._overlaps[key] = not first.members.isdisjoint(second.members)
        return overlaps

    def _pool(self, selector: Items) -> NodePool:
        pool = self._pools.get(selector)
        if pool is None:
            labels = set(selector)
            matching = frozenset(
                i for i, node in enumerate(self.nodes) if labels <= node.labels.items()
            )
            members = frozenset(i for i in matching if self.nodes[i].usable)
            pool = self._pools[selector] = NodePool(len(self._pools), members, matching)
        return pool


class FreeCapacity:
    """The free capacity of each machine, and how many pods of each shape fit."""

    def __init__(self, nodes: NodeIndex, free: list[Free]) -> None:
        self.nodes = nodes
        self.free = free
        self._fits: dict[PodShape, list[int]] = {}
        self._totals: dict[PodShape, int] = {}

    def copy(self, shape: PodShape) -> "FreeCapacity":
        """Return an independent copy, with the counts of this shape."""
        copy = FreeCapacity(self.nodes, list(self.free))
        if shape in self._totals:
            copy._totals[shape] = self._totals[shape]
            copy._fits[shape] = list(self._fits[shape])
        return copy

    def least(self, other: "FreeCapacity") -> "FreeCapacity":
        """Return what is free in both."""
        pairs = zip(self.free, other.free, strict=True)
        return FreeCapacity(self.nodes, [tuple(map(min, first, second)) for first, second in pairs])

    def capacity(self, shape: PodShape) -> int:
        """Return how many pods of the shape fit."""
        if not self.nodes.has_nodes:
            return UNLIMITED
        if shape not in self._totals:
            counts = [0] * len(self.free)
            for i in shape.pool.members:
                counts[i] = shape.fit(self.free[i])
            self._fits[shape] = counts
            self._totals[shape] = sum(counts)
        return self._totals[shape]

    def place(self, shape: PodShape, pods: int) -> Placement:
        """Return machines for this many pods, the fullest machines first. The pods have to fit."""
        assert self.capacity(shape) >= pods
        if not self.nodes.has_nodes:
            return {}
        placement: Placement = {}
        for fit, i in sorted((fit, i) for i, fit in enumerate(self._fits[shape]) if fit):
            placement[i] = min(fit, pods)
            pods -= placement[i]
            if not pods:
                break
        return placement

    def place_admitted(self, shape: PodShape, pods: int) -> Placement:
        """Return machines for admitted pods, even if they do not fit.

        Pods that do not fit are assumed on the largest machines, where others have to leave first.
        """
        placement = self.place(shape, min(pods, self.capacity(shape)))
        pods -= sum(placement.values())
        if pods > 0 and self.nodes.has_nodes:
            empty = self.nodes.empty()
            sizes = sorted((-shape.fit(empty.free[i]), i) for i in shape.pool.members)
            for size, i in sizes:
                placed_pods = min(pods, -size)
                placement[i] = placement.get(i, 0) + placed_pods
                pods -= placed_pods
        return placement

    def take(self, shape: PodShape, placement: Placement, times: int = 1) -> None:
        """Count the pods as placed; `times` -1 removes them."""
        for i, pods in placement.items():
            free = list(self.free[i])
            for resource, amount in shape.needs:
                free[resource] -= amount * pods * times
            self.set(i, tuple(free))

    def set(self, i: int, free: Free) -> None:
        """Set the free capacity of a machine, and update the counts of all shapes."""
        self.free[i] = free
        for shape, counts in self._fits.items():
            if i in shape.pool.members:
                fit = shape.fit(free)
                self._totals[shape] += fit - counts[i]
                counts[i] = fit
