"""The sizes of a run."""

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a run. The defaults are those of the published figures."""

    nodes: tuple[int, ...] = (1, 2, 8, 256)  # of each job
    teams: int = 20  # namespaces
    idle: int = 100  # jobs, one every 50 ms
    burst: int = 1000  # jobs; a quarter of them with 256 nodes
    rounds: int = 3  # turns of each competitor
    restarts: int = 100  # gangs
    large: tuple[int, ...] = (1000, 5000)  # pods of a gang
    jobs: int = 10_000  # in the cluster of `cold`
    gang: int = 10  # pods of each
    spread: int = 500  # namespaces
    events: int = 100_000  # of pods
    protocol: tuple[int, ...] = (2, 64, 256, 1000)  # nodes of a gang in `rounds`
    protocol_restarts: int = 20  # of each gang


QUICK = Options(
    nodes=(1, 2),
    teams=3,
    idle=10,
    burst=40,
    rounds=1,
    restarts=2,
    large=(50,),
    jobs=20,
    gang=2,
    spread=5,
    events=2000,
    protocol=(2, 8),
    protocol_restarts=3,
)
