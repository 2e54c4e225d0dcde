"""Ray in the pods of one job: index 0 is the head and calls the function, the rest are workers.

Workers keep a connection to the head in addition to those of Ray. The head counts these
connections, and sends a last message when it has finished. So workers can distinguish this from a
head that died. (Without it they would fail about a minute after the head, seen with Ray 2.) A lost
connection ends nothing: Ray has its own connections, and the pod of the head decides. Workers
authenticate with the secret of the call, see `control_port`.

Ray itself has no authentication: anyone who can connect to its ports can run code in its pods. A
queue with `networking.isolate` restricts them to the pods of the job.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from torchrun_sdk.errors import QuorumTimeout
from torchrun_sdk.spec import FOLDER, IN_CALL, Call
from torchrun_sdk.worker import control_port

PORT = 6379
# Host of the dashboard, whose API runs jobs: only users who may forward a port can connect.
_DASHBOARD_HOST = "127.0.0.1"
DASHBOARD = 8265
# Port and last message of the connections to the head.
_CONTROL = control_port.PORT
_DONE = control_port.DONE
# Ray uses this variable as the job config of every driver.
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# If set, the arguments of ray.init override the job config.
_RUNTIME_ENV_OVERRIDE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
_PAUSE = 1.0
_START_SECONDS = 120
_RECONNECT_SECONDS = 60.0  # of a worker to the head
_PORTS = ("--node-manager-port=8077", "--object-manager-port=8076")


@contextmanager
def head(call: Call) -> Iterator[None]:
    """Run Ray on this node with the workers of the call, which end with it.

    Raises QuorumTimeout, and CalledProcessError where Ray does not start.
    """
    with _Workers(call.secret) as connected:
        dashboard = f"--dashboard-host={_DASHBOARD_HOST}"
        _ray("start", "--head", f"--port={PORT}", dashboard, *_PORTS, *_gpus(None))
        try:
            connected.wait(call.workers, call.quorum)
            yield
            connected.dismiss()
        finally:
            _stop()


@contextmanager
def joined(call: Call, folder: Path) -> Iterator[None]:
    """Join the RayCluster of the call as a node without tasks. The cluster ends with it.

    Raises QuorumTimeout, and CalledProcessError where Ray does not start.
    """
    with _connect(call.cluster, call.secret, call.quorum) as connection:
        nothing = ("--num-cpus=0", "--num-gpus=0")
        _ray("start", f"--address={call.cluster}:{PORT}", *nothing, *_PORTS)
        os.environ.setdefault(_RUNTIME_ENV_OVERRIDE, "1")
        os.environ[_JOB_CONFIG] = json.dumps({"runtime_env": _runtime_env(call, folder)})
        try:
            yield
            with suppress(OSError):  # the cluster ends without it, only later
                connection.sendall(_DONE)
        finally:
            _stop()


def _runtime_env(call: Call, folder: Path) -> dict[str, object]:
    """The runtime environment for workers of the cluster, which do not have the workspace."""
    return {
        "working_dir": str(folder.parent),
        "excludes": [f"/{FOLDER}"],
        "py_modules": [str(Path(__file__).parents[1])],
        "env_vars": {IN_CALL: call.id},
    }


def send_by_value(script: ModuleType) -> None:
    """Pickle definitions of a script by value for Ray's workers, which cannot import it."""
    importlib.import_module("ray.cloudpickle").register_pickle_by_value(script)


def work(call: Call, address: str) -> int:
    """Run a worker until the head has finished (0) or does not respond any more (1)."""
    connection = _connect(address, call.secret, call.quorum)
    is_over = threading.Event()
    ray = threading.Thread(target=_keep, args=(address, call.worker_gpus, is_over), daemon=True)
    ray.start()
    try:
        while not _is_dismissed(connection):
            connection = _connect(address, call.secret, _RECONNECT_SECONDS)
        return 0
    except QuorumTimeout:
        return 1
    finally:
        is_over.set()
        _stop()


def _is_dismissed(connection: socket.socket) -> bool:
    """Wait for the last message of the head; False if the connection is lost before it."""
    with connection, suppress(OSError):
        return connection.recv(len(_DONE)) == _DONE
    return False


def _is_lost(connection: socket.socket) -> bool:
    """Whether the connection to a worker, which sends nothing, has ended."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _keep(address: str, gpus: int | None, is_over: threading.Event) -> None:
    """Run Ray on this node, and restart it if it ends before the head."""
    while not is_over.is_set():
        words = ("start", f"--address={address}:{PORT}", "--block", *_PORTS, *_gpus(gpus))
        subprocess.run(["ray", *words], check=False)
        is_over.wait(_PAUSE)


def _ray(*words: str) -> None:
    subprocess.run(["ray", *words], check=True, timeout=_START_SECONDS)


def _stop() -> None:
    """Stop Ray on this node, ignoring errors."""
    with suppress(OSError, subprocess.SubprocessError):
        _ray("stop", "--force")


def _gpus(count: int | None) -> list[str]:
    """Flags for the number of GPUs; Ray detects real GPUs by itself."""
    return [] if count is None else [f"--num-gpus={count}"]


def _connect(address: str, secret: str, seconds: float) -> socket.socket:
    """The connection to the head, after it has started. Raises QuorumTimeout."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError):
            connection = socket.create_connection((address, _CONTROL), timeout=5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with suppress(OSError):
                if control_port.show(connection, secret, 5.0):
                    return connection
            connection.close()
        time.sleep(_PAUSE)
    raise QuorumTimeout(f"the head {address} did not respond within {seconds:g} s")


class _Workers:
    """The workers that are connected to the head and have sent the call's secret."""

    def __init__(self, secret: str) -> None:
        self._control_port = control_port.ControlPort(_CONTROL, control_port.digest(secret))
        self._connections: list[socket.socket] = []

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._control_port.__exit__()
        for connection in self._connections:
            connection.close()

    def wait(self, count: int, seconds: float) -> None:
        """Wait for this number of workers. Raises QuorumTimeout."""
        until = time.monotonic() + seconds
        while len(self._connections) < count:
            connection = self._control_port.accept(until - time.monotonic())
            if connection is None:
                raise QuorumTimeout(
                    f"{len(self._connections)} of {count} workers joined within {seconds:g} s"
                )
            # A worker that connects again counts once.
            for lost in [each for each in self._connections if _is_lost(each)]:
                self._connections.remove(lost)
                lost.close()
            self._connections.append(connection)

    def dismiss(self) -> None:
        """Tell all workers, including late ones, that the head has finished."""
        while (connection := self._control_port.accept(0.0)) is not None:
            self._connections.append(connection)
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(_DONE)


def index() -> int:
    """The index of this node in its job."""
    return int(os.environ.get("NODE_RANK", "0"))
