"""What a RayJob of KubeRay runs: it keeps the RayCluster for as long as a call's pod is there.

That pod connects, says DONE at its end, and has a successor where it is lost. This file travels as
text into an image that has nothing else of this package.
"""

from __future__ import annotations

import socket
import sys

PORT = 6378  # beside Ray's own
DONE = b"done\n"
# A pod whose node is lost does not hang up: it is asked.
_ASKED = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))


def hold(seconds: float, again: float, port: int) -> int:
    """Until a pod has said DONE (0), or none has come for so long, `again` after one (1)."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=dual) as server:
        while True:
            server.settimeout(seconds)
            try:
                pod, _ = server.accept()
            except socket.timeout:
                print(f"no pod has come for {seconds:g} s", flush=True)
                return 1
            if _is_done(pod):
                return 0
            seconds = again


def _is_done(pod: socket.socket) -> bool:
    with pod:
        pod.settimeout(None)
        pod.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ASKED:
            if hasattr(socket, option):
                pod.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        try:
            return pod.recv(len(DONE)) == DONE
        except OSError:
            return False


if __name__ == "__main__":
    sys.exit(hold(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
