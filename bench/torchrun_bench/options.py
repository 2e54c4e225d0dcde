"""The sizes of a run."""

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a run. The defaults are those of the published figures."""

    nodes: tuple[int, ...] = (1, 2, 8, 256)  # of each job
    teams: int = 20  # namespaces
    idle: int = 100  # jobs, one every 50 ms
    burst: int = 1000  # jobs; a quarter of them with 256 nodes
    rounds: int = 3  # turns of each competitor
    writes: int = 150  # of each kind in a turn of `writes`
    restarts: int = 100  # gangs
    large: tuple[int, ...] = (1000, 5000)  # pods of a gang
    lives: int = 50  # jobs from creation to success
    scales: tuple[int, ...] = (100, 1000, 10_000)  # jobs in the cluster
    gang: int = 10  # pods of each
    spread: int = 500  # namespaces
    minutes: float = 60.0  # of `hour`
    rest: float = 60.0  # seconds
    resumes: int = 7  # starts of the controller with a job that waits
    grown: int = 50  # jobs one at a time at each scale
    events: int = 100_000  # of pods
    plant: float = 0.0  # see planted.py


QUICK = Options(
    nodes=(1, 2),
    teams=3,
    idle=10,
    burst=40,
    rounds=1,
    writes=3,
    restarts=2,
    large=(50,),
    lives=2,
    scales=(10, 20),
    gang=2,
    spread=5,
    minutes=0.2,
    rest=3.0,
    resumes=1,
    grown=5,
    events=2000,
)
