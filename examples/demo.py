"""From nothing to a real two-node PyTorch run: `make demo`.

Standard library only. With CLUSTER=current nothing can be put into your nodes from here: name
images that they can pull in CONTROLLER_IMAGE and TRAINER_IMAGE. KEEP=1 leaves everything running.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPT = ROOT / "examples" / "gpt"
PLUGIN = ROOT / ".venv" / "plugin" / "bin"
NAMESPACE = "torchrun-demo"
CONTROLLER = "torchrun-controller:0.1.0"
TORCH = "localhost/torchrun-torch:latest"  # what examples/gpt/queue.yaml names
COMMAND = "python train.py --steps 60 --log-every 5"
CURRENT = os.environ.get("CLUSTER") == "current"
STAGES = 7
PATH = os.environ["PATH"]

timings: list[tuple[str, float]] = []


@contextmanager
def stage(title: str) -> Iterator[None]:
    """One numbered line before and one with the seconds after."""
    number, started = len(timings) + 1, time.monotonic()
    print(f"\n[{number}/{STAGES}] {title}", flush=True)
    yield
    timings.append((title, time.monotonic() - started))
    print(f"[{number}/{STAGES}] done in {timings[-1][1]:.1f} s", flush=True)


def run(*command: str, cwd: Path = ROOT, stdin: str | None = None) -> str:
    """Run a program with its stderr on ours; ends the demo with its words where it fails."""
    ended = subprocess.run(
        command, cwd=cwd, input=stdin, stdout=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {ended.returncode}\n{ended.stdout}")
    return ended.stdout


def cluster(*arguments: str) -> str:
    """One verb of the cluster command; its last line of output."""
    lines = run(sys.executable, "-m", "torchrun_cluster", *arguments).strip().splitlines()
    return lines[-1] if lines else ""


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """kubectl against the demo's cluster."""
    return run("kubectl", *arguments, stdin=stdin)


def images() -> tuple[str, str]:
    """The controller's and the trainer's image, in the cluster's reach."""
    if CURRENT:
        try:
            return os.environ["CONTROLLER_IMAGE"], os.environ["TRAINER_IMAGE"]
        except KeyError as error:
            raise SystemExit(f"CLUSTER=current needs {error} (see examples/demo.py)") from None
    inputs = (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "requirements",
        "api",
        "controller",
        "runtime",
    )
    controller = cluster(
        "image", "build", "--tag", f"docker.io/library/{CONTROLLER}",
        *(f"--input={part}" for part in inputs),
    )  # fmt: skip
    torch = cluster("image", "torch")
    cluster("load", controller, torch)
    return CONTROLLER, TORCH


def install(image: str) -> None:
    """CRDs, controller, roles and the demo's queue."""
    manifests = kubectl("kustomize", "manifests").replace(CONTROLLER, image)
    kubectl("apply", "--server-side", "-f", "-", stdin=manifests)
    kubectl(
        "-n", "torchrun-system", "rollout", "status", "deployment/torchrun-controller",
        "--timeout=180s",
    )  # fmt: skip


def submit() -> int:
    """The user's own step: a directory, a command, and the run's result as exit code."""
    command = ["kubectl", "torchrun", "submit", "-n", NAMESPACE, "--queue", "cpu", "--nodes", "2"]
    print(f"  $ cd examples/gpt && {' '.join(command)} '{COMMAND}'", flush=True)
    return subprocess.run(
        [*command, "--name", "gpt", "--follow", COMMAND], cwd=GPT, check=False
    ).returncode


def tear_down() -> None:
    """Leave nothing behind, unless asked to."""
    if os.environ.get("KEEP") == "1":
        print(
            "\nKEEP=1: everything runs on; `make cluster-down` removes it. To go on with it:\n"
            f"  export KUBECONFIG={os.environ['KUBECONFIG']}\n"
            f"  export PATH={os.environ['PATH'].removesuffix(PATH)}$PATH\n"
            f"  kubectl torchrun list -n {NAMESPACE}"
        )
    elif CURRENT:
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
        print("\nthe controller stays installed; docs/install.md says how it is removed")
    else:
        cluster("down", "--name", "demo")


def main() -> int:
    """Stage by stage; the exit code is the run's."""
    os.environ["PYTHONPATH"] = str(ROOT / "cluster")
    with stage("a Kubernetes cluster"):
        cluster("up", "--name", "demo")
        os.environ["KUBECONFIG"] = cluster("kubeconfig", "--name", "demo")
        if not CURRENT:
            tools = Path(cluster("binaries", "kubectl")).parent
            os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
        os.environ["PATH"] = f"{PLUGIN}:{os.environ['PATH']}"
    try:
        with stage("images of the controller and of PyTorch, loaded into the node"):
            controller, torch = images()
        with stage("CRDs and controller"):
            install(controller)
        with stage("a namespace and a queue for CPU jobs"):
            # What an earlier run with KEEP=1 has left.
            kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
            kubectl("create", "namespace", NAMESPACE)
            queue = (GPT / "queue.yaml").read_text().replace(TORCH, torch)
            kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=queue)
        with stage("a run on two nodes from examples/gpt"):
            code = submit()
        with stage("the story, as kubectl tells it"):
            print(kubectl("-n", NAMESPACE, "get", "torchrunjobs"))
            print(kubectl("-n", NAMESPACE, "get", "pods"))
            if code:
                print(kubectl("-n", NAMESPACE, "describe", "torchrunjob", "gpt"))
    finally:
        with stage("clean up"):
            tear_down()
    print("\nseconds by stage")
    for title, seconds in timings:
        print(f"  {seconds:7.1f}  {title}")
    print(f"  {sum(seconds for _, seconds in timings):7.1f}  in all")
    print("\nSucceeded" if code == 0 else f"\nthe run ended with {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
