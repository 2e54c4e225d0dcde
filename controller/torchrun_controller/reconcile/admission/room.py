"""How many pods of which shape fit onto the nodes, with what is there already.

Several pods may share a node. What a node has free may be negative, where it is promised to
somebody before those that use it now are gone: then nobody else fits there.
"""

from collections.abc import Iterable

from torchrun_controller.reconcile.admission.state import Node, Request

# Of a pod that requests nothing, or where nothing is known of nodes, as many fit as anybody wants.
MANY = 1 << 30
Free = tuple[int, ...]
Placement = dict[int, int]
Items = tuple[tuple[str, str], ...]


class Pool:
    """The usable nodes with the same labels wanted, by their indexes."""

    def __init__(self, number: int, members: frozenset[int]) -> None:
        self.number = number
        self.members = members


class Shape:
    """Pods that request the same and may run on the same nodes."""

    def __init__(self, needs: tuple[tuple[int, int], ...], pool: Pool) -> None:
        self.needs = needs
        self.pool = pool
        self._known: dict[Free, int] = {}

    def fit(self, free: Free) -> int:
        """How many of these pods fit where so much is free."""
        count = self._known.get(free)
        if count is None:
            count = max(0, min((free[r] // amount for r, amount in self.needs), default=MANY))
            self._known[free] = count
        return count


class Machines:
    """The nodes of a State in the order of their names, and the shapes that were asked for."""

    def __init__(self, nodes: tuple[Node, ...] | None, resources: Iterable[str]) -> None:
        self.known = nodes is not None
        self.nodes = sorted(nodes or (), key=lambda node: node.name)
        self.index = {node.name: i for i, node in enumerate(self.nodes)}
        self._resources = {name: i for i, name in enumerate(sorted(resources))}
        self._pools: dict[Items, Pool] = {}
        self._shapes: dict[tuple[tuple[tuple[str, int], ...], Items], Shape] = {}
        self._as_written: dict[tuple[object, ...], Shape] = {}
        self._overlaps: dict[tuple[int, int], bool] = {}

    def empty(self) -> "Room":
        """The nodes with nothing on them."""
        names = self._resources
        free = [tuple(node.allocatable.get(name, 0) for name in names) for node in self.nodes]
        return Room(self, free)

    def shape(self, request: Request) -> Shape:
        """The shape of the request's pods: one object for all that are alike."""
        written = (*request.pod.items(), *request.node_selector.items())
        shape = self._as_written.get(written)
        if shape is None:
            shape = self._as_written[written] = self._shape(request)
        return shape

    def _shape(self, request: Request) -> Shape:
        pod, selector = (
            tuple(sorted(request.pod.items())),
            tuple(sorted(request.node_selector.items())),
        )
        shape = self._shapes.get((pod, selector))
        if shape is None:
            needs = tuple((self._resources[name], amount) for name, amount in pod if amount > 0)
            shape = self._shapes[pod, selector] = Shape(needs, self._pool(selector))
        return shape

    def overlap(self, one: Pool, other: Pool) -> bool:
        """Whether two pools share nodes; where nothing is known of nodes they may."""
        if one is other or not self.known:
            return True
        key = (min(one.number, other.number), max(one.number, other.number))
        found = self._overlaps.get(key)
        if found is None:
            found = self._overlaps[key] = not one.members.isdisjoint(other.members)
        return found

    def _pool(self, selector: Items) -> Pool:
        pool = self._pools.get(selector)
        if pool is None:
            wanted = set(selector)
            members = frozenset(
                i
                for i, node in enumerate(self.nodes)
                if node.usable and wanted <= node.labels.items()
            )
            pool = self._pools[selector] = Pool(len(self._pools), members)
        return pool


class Room:
    """What is free on each node, and how many pods fit of the shapes that were asked for."""

    def __init__(self, machines: Machines, free: list[Free]) -> None:
        self.machines = machines
        self.free = free
        self._fits: dict[Shape, list[int]] = {}
        self._totals: dict[Shape, int] = {}

    def copy(self, shape: Shape) -> "Room":
        """The same room, to be changed apart from this one and asked for this shape first."""
        room = Room(self.machines, list(self.free))
        if shape in self._totals:
            room._totals[shape] = self._totals[shape]
            room._fits[shape] = list(self._fits[shape])
        return room

    def least(self, other: "Room") -> "Room":
        """What is free in both."""
        pairs = zip(self.free, other.free, strict=True)
        return Room(self.machines, [tuple(map(min, one, two)) for one, two in pairs])

    def capacity(self, shape: Shape) -> int:
        """How many pods of the shape fit."""
        if not self.machines.known:
            return MANY
        if shape not in self._totals:
            fits = [0] * len(self.free)
            for i in shape.pool.members:
                fits[i] = shape.fit(self.free[i])
            self._fits[shape] = fits
            self._totals[shape] = sum(fits)
        return self._totals[shape]

    def place(self, shape: Shape, pods: int) -> Placement:
        """Nodes for so many pods, the fullest ones first; that many have to fit."""
        assert self.capacity(shape) >= pods
        if not self.machines.known:
            return {}
        placement: Placement = {}
        for fit, i in sorted((fit, i) for i, fit in enumerate(self._fits[shape]) if fit):
            placement[i] = min(fit, pods)
            pods -= placement[i]
            if not pods:
                break
        return placement

    def claim(self, shape: Shape, pods: int) -> Placement:
        """Nodes for pods that have a right to them, whether they fit or not.

        Those that do not fit are promised the largest nodes, where others have to leave first.
        """
        placement = self.place(shape, min(pods, self.capacity(shape)))
        pods -= sum(placement.values())
        if pods > 0 and self.machines.known:
            bare = self.machines.empty()
            sizes = sorted((-shape.fit(bare.free[i]), i) for i in shape.pool.members)
            for size, i in sizes:
                more = min(pods, -size)
                placement[i] = placement.get(i, 0) + more
                pods -= more
        return placement

    def take(self, shape: Shape, placement: Placement, times: int = 1) -> None:
        """The pods are there from now on; with `times` -1 no longer."""
        for i, pods in placement.items():
            free = list(self.free[i])
            for resource, amount in shape.needs:
                free[resource] -= amount * pods * times
            self.set(i, tuple(free))

    def set(self, i: int, free: Free) -> None:
        """So much is free on the node."""
        self.free[i] = free
        for shape, fits in self._fits.items():
            if i in shape.pool.members:
                fit = shape.fit(free)
                self._totals[shape] += fit - fits[i]
                fits[i] = fit
