"""The controller on this machine, on the demo's cluster: `make debug`.

Starts the cluster or finds it (`make cluster-down` ends it), installs the CRDs and the queue of the
demo, takes a controller that runs in the cluster to zero replicas, and becomes the controller: a
`breakpoint()` in the code opens pdb here. DEBUGPY=5678 waits for a debugger on that port instead;
ARGS are more of the controller's flags.
"""

import os
import shlex
import sys
from pathlib import Path

import demo

MANIFESTS = demo.ROOT / "manifests"
SYSTEM = ("-n", "torchrun-system")
LOOPBACK = "127.0.0.1"


def install(torch: str) -> None:
    """CRDs and queue, and no second controller."""
    demo.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(MANIFESTS / "crd"))
    demo.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    running = demo.kubectl(*SYSTEM, "get", "deployment", "-o", "name", "--ignore-not-found")
    for deployment in running.split():
        demo.kubectl(*SYSTEM, "scale", deployment, "--replicas=0")
    namespace = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {demo.NAMESPACE}\n"
    demo.kubectl("apply", "-f", "-", stdin=namespace)
    queue = (demo.GPT / "queue.yaml").read_text().replace(demo.TORCH, torch)
    demo.kubectl("-n", demo.NAMESPACE, "apply", "-f", "-", stdin=queue)


def controller(image: str) -> list[str]:
    """The command line; a leader by itself, as nothing is to wait for a lease."""
    port = os.environ.get("DEBUGPY", "")
    waiting = ["-m", "debugpy", "--listen", f"{LOOPBACK}:{port}", "--wait-for-client"]
    return [
        *(sys.executable, *(waiting if port else ())),
        *("-m", "torchrun_controller", "--runtime-image", image, "--leader-election", "false"),
        *("--listen-address", LOOPBACK, "--log-format", "console", "--log-level", "debug"),
        *("--uvloop", "false"),
        *shlex.split(os.environ.get("ARGS", "")),
    ]


def main() -> None:
    """Prepare, say how to use it, and become the controller."""
    os.environ["PYTHONPATH"] = str(demo.ROOT / "cluster")
    demo.cluster("up", "--name", "demo")
    os.environ["KUBECONFIG"] = demo.cluster("kubeconfig", "--name", "demo")
    folders = [str(demo.PLUGIN)]
    if not demo.CURRENT:
        folders.append(str(Path(demo.cluster("kubectl", "--name", "demo")).parent))
    os.environ["PATH"] = os.pathsep.join([*folders, demo.PATH])
    image, torch = demo.images()
    install(torch)
    del os.environ["PYTHONPATH"]
    command = controller(image)
    print(
        "\nIn another shell:\n"
        f"  export KUBECONFIG={os.environ['KUBECONFIG']}\n"
        f"  export PATH={os.pathsep.join(folders)}:$PATH\n"
        f"  cd examples/gpt && kubectl torchrun submit -n {demo.NAMESPACE} --queue cpu"
        f' --nodes 2 "{demo.COMMAND}"\n'
        f"\n{shlex.join(command)}\n",
        flush=True,
    )
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
