"""From nothing to a real two-node PyTorch run: `make demo`.

Standard library only. With CLUSTER=current, set CONTROLLER_IMAGE and TRAINER_IMAGE to images that
the machines can pull. KEEP=1 leaves everything running.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPT = ROOT / "examples" / "gpt"
PLUGIN = ROOT / ".venv" / "plugin" / "bin"
NAMESPACE = "torchrun-demo"
CONTROLLER = "torchrun-controller:0.1.0"
TORCH = "localhost/torchrun-torch:latest"  # what examples/gpt/queue.yaml names
INPUTS = ("pyproject.toml", "README.md", "LICENSE", "requirements", "api", "controller", "runtime")
COMMAND = "python train.py --steps 60 --log-every 5"
CURRENT = os.environ.get("CLUSTER") == "current"
STAGES = 7
PATH = os.environ["PATH"]

timings: list[tuple[str, float]] = []


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Print a numbered line before the stage, and its duration after it."""
    number, started = len(timings) + 1, time.monotonic()
    print(f"\n[{number}/{STAGES}] {title}", flush=True)
    yield
    timings.append((title, time.monotonic() - started))
    print(f"[{number}/{STAGES}] done in {timings[-1][1]:.1f} s", flush=True)


def run(*command: str, cwd: Path = ROOT, stdin: str | None = None) -> str:
    """Run a program and return its stdout. Exit with its output if it fails."""
    ended = subprocess.run(
        command, cwd=cwd, input=stdin, stdout=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {ended.returncode}\n{ended.stdout}")
    return ended.stdout


def cluster(*arguments: str) -> str:
    """Run one verb of the cluster command and return its last line of output."""
    lines = run(sys.executable, "-m", "torchrun_cluster", *arguments).strip().splitlines()
    return lines[-1] if lines else ""


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """Run kubectl against the demo cluster."""
    return run("kubectl", *arguments, stdin=stdin)


def build_images() -> int:
    """Build the images of the controller and the trainer, and print their archives."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where the cluster has failed
    controller = ("build", "--tag", f"docker.io/library/{CONTROLLER}")
    print(cluster("image", *controller, *(f"--input={part}" for part in INPUTS)))
    print(cluster("image", "torch"))
    return 0


@contextmanager
def image_builds() -> Iterator[subprocess.Popen[str]]:
    """Run `build_images` meanwhile: a first cluster is built for minutes."""
    command = [sys.executable, __file__, "--images"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as builds:
        try:
            yield builds
        finally:
            if builds.poll() is None:
                os.killpg(builds.pid, signal.SIGINT)


def images(builds: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the images of the controller and the trainer, and load them into the cluster."""
    archives, _ = builds.communicate()
    if builds.returncode:
        raise SystemExit(f"the image builds failed with {builds.returncode}")
    cluster("load", *archives.split())
    return CONTROLLER, TORCH


def given_images() -> tuple[str, str]:
    """Return the images that the user names for the current cluster."""
    try:
        return os.environ["CONTROLLER_IMAGE"], os.environ["TRAINER_IMAGE"]
    except KeyError as error:
        raise SystemExit(f"CLUSTER=current needs {error} (see examples/demo.py)") from None


def install(image: str) -> None:
    """Install the CRDs, the roles and the controller."""
    manifests = kubectl("kustomize", "manifests").replace(CONTROLLER, image)
    kubectl("apply", "--server-side", "-f", "-", stdin=manifests)
    kubectl(
        "-n", "torchrun-system", "rollout", "status", "deployment/torchrun-controller",
        "--timeout=180s",
    )  # fmt: skip


def submit() -> int:
    """Submit the job as a user does, and return the exit code of the run."""
    command = ["kubectl", "torchrun", "submit", "-n", NAMESPACE, "--queue", "cpu", "--nodes", "2"]
    print(f"  $ cd examples/gpt && {' '.join(command)} '{COMMAND}'", flush=True)
    return subprocess.run(
        [*command, "--name", "gpt", "--follow", COMMAND], cwd=GPT, check=False
    ).returncode


def tear_down() -> None:
    """Remove everything, unless KEEP=1."""
    if os.environ.get("KEEP") == "1":
        print(
            "\nKEEP=1: the cluster keeps running; `make cluster-down` removes it. To use it:\n"
            f"  export KUBECONFIG={os.environ['KUBECONFIG']}\n"
            f"  export PATH={os.environ['PATH'].removesuffix(PATH)}$PATH\n"
            f"  kubectl torchrun list -n {NAMESPACE}"
        )
    elif CURRENT:
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
        print("\nThe controller stays installed. To remove it, see docs/install.md.")
    else:
        cluster("down", "--name", "demo")


def announce() -> int:
    """Print what the demo does, how long it takes and what is missing; 1 if anything is."""
    print("make demo starts a cluster, runs a two-node PyTorch job on it and removes it again:")
    if not (PLUGIN / "kubectl-torchrun").exists():
        print("  Python     an environment for kubectl torchrun, in .venv/plugin, about 1 min")
    sys.stdout.flush()
    return subprocess.run(
        [sys.executable, "-m", "torchrun_cluster", "plan"], check=False
    ).returncode


def main() -> int:
    """Run all stages and return the exit code of the run."""
    os.environ["PYTHONPATH"] = str(ROOT / "cluster")
    if sys.argv[1:] == ["--plan"]:
        return announce()
    if sys.argv[1:] == ["--images"]:
        return build_images()
    if CURRENT:
        return demo(given_images)
    with image_builds() as builds:
        return demo(lambda: images(builds))


def demo(find_images: Callable[[], tuple[str, str]]) -> int:
    """Run all stages; `find_images` returns the images of the controller and the trainer."""
    with stage("a Kubernetes cluster"):
        cluster("up", "--name", "demo")
        os.environ["KUBECONFIG"] = cluster("kubeconfig", "--name", "demo")
        if not CURRENT:
            tools = Path(cluster("kubectl", "--name", "demo")).parent
            os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
        os.environ["PATH"] = f"{PLUGIN}:{os.environ['PATH']}"
    try:
        with stage("images of the controller and PyTorch, loaded into the node"):
            controller, torch = find_images()
        with stage("CRDs and controller"):
            install(controller)
        with stage("a namespace and a queue for CPU jobs"):
            # Left by an earlier run with KEEP=1.
            kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
            kubectl("create", "namespace", NAMESPACE)
            queue = (GPT / "queue.yaml").read_text().replace(TORCH, torch)
            kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=queue)
        with stage("a run on two nodes from examples/gpt"):
            code = submit()
        with stage("status of the job and its pods"):
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
    print(f"  {sum(seconds for _, seconds in timings):7.1f}  total")
    print("\nSucceeded" if code == 0 else f"\nThe run failed with exit code {code}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
