"""Import torchrun, wait for the launcher's order, and run the command as torchrun would.

The launcher starts it with the Python of torchrun: standby_agent.py DESCRIPTOR, a Unix socket. The
agent writes `r` once torchrun is imported, reads the order, and writes `s` before it runs it. It
ends if the launcher closes the socket. See `standby`.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import socket
import sys
from typing import Any


def main() -> None:
    """Wait for one order and follow it."""
    channel = socket.socket(fileno=int(sys.argv[2]))
    from torch.distributed.run import main as torchrun  # type: ignore[import-not-found]

    channel.sendall(b"r")
    order, descriptors = _receive(channel)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    for target, descriptor in zip((1, 2), descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # The reports of exceptions, as in every Python of the command.
    folder = os.path.join(os.path.dirname(os.path.abspath(sys.argv[1])), "rank")
    runpy.run_path(os.path.join(folder, "sitecustomize.py"), run_name="torchrun_launch_reports")
    channel.sendall(b"s")
    channel.close()
    sys.argv = [order["program"], *order["arguments"]]
    sys.exit(torchrun(order["arguments"]))


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The order and the descriptors that come with it. Ends the process if there is none."""
    rights = array.array("i")
    head, ancillary, _, _ = channel.recvmsg(16, socket.CMSG_SPACE(2 * rights.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
    if not head:
        os._exit(0)
    missing, body = int(head), b""
    while len(body) < missing:
        data = channel.recv(missing - len(body))
        if not data:
            os._exit(0)
        body += data
    return json.loads(body), list(rights)


if __name__ == "__main__":
    main()
