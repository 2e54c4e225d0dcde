"""A relay between a client and the API server that can be cut. Data in flight is lost."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from torchrun_cluster import LocalCluster


class Relay:
    """Forwards bytes until it is cut."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        target = urlsplit(cluster.server)
        self._target = (target.hostname, target.port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []  # open connections
        self._made: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self.kubeconfig = folder / "kubeconfig"
        config = json.loads(cluster.kubeconfig.read_text())
        for cluster_entry in config["clusters"]:
            port = self._listening.getsockname()[1]
            cluster_entry["cluster"]["server"] = f"https://127.0.0.1:{port}"
        self.kubeconfig.write_text(json.dumps(config))

    @contextmanager
    def running(self) -> Iterator["Relay"]:
        """Until the end of the block."""
        thread = threading.Thread(target=self._accept)
        thread.start()
        try:
            yield self
        finally:
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self.heal()
            thread.join()
            self.heal()
            for pump in self._pumps:
                pump.join()
            for sock in (self._listening, *self._made):
                sock.close()

    def cut(self) -> None:
        """Drop all data. Neither side sees an end of the connection."""
        self._open.clear()

    def heal(self) -> None:
        """Accept new connections. Earlier ones stay dead."""
        while self._sockets:
            sock = self._sockets.pop()
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._open.wait()
                server = socket.create_connection(self._target)
                self._sockets += (client, server)
                self._made += (client, server)
                for pair in ((client, server), (server, client)):
                    pump = threading.Thread(target=self._pump, args=pair)
                    self._pumps.append(pump)
                    pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self._open.is_set():
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
