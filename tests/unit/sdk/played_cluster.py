"""`kubectl` and its plugin for a cluster in a folder. Pods are folders, and ranks are processes.

Run under one of the two names, it executes the commands of the SDK:

    job.json            the TorchrunJob; missing after its deletion
    pods/NAME.json      Pods with the status of the kubelet; NAME begins with the name of the job
    workspace/NAME      a pod's workspace
    log                 of all ranks
    state               the job's state directory
    rayjobs.ray.io.json its RayJob, and pods.json a list of Pods, as `kubectl get` prints them
    commands            the commands that were run, a line each
    kubeconfig          if there: the output of `kubectl config view --minify --output=json`
    lock                held by each change of job.json
    refuse              if there: beginnings of commands that fail, with their messages
    slow                if there: no pod starts
    hangs               if there: an upload comes to no end
    lists               if there: a list of files comes to no end
    holds               if there: a deletion comes to no end
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(os.environ.get("FAKE_CLUSTER", ""))
JOB = ROOT / "job.json"
PODS = ROOT / "pods"
JOB_NAME = "torchrun-job-name"
POLL = 0.05
OUTPUT_SECONDS = 60.0


@contextmanager
def locked(root: Path = ROOT) -> Iterator[None]:
    """Hold the lock of job.json. A change reads the file and then replaces it."""
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(program: str, arguments: list[str]) -> int:
    refused = _text(ROOT / "refuse").splitlines()  # a test may write it after this command
    with (ROOT / "commands").open("a") as log:
        log.write(f"{program} {' '.join(arguments)}\n")
    selects = ("--namespace", "--context", "--no-defaults")
    arguments = [argument for argument in arguments if not argument.startswith(selects)]
    for line in refused:
        prefix, _, answer = line.partition(":")
        if " ".join(arguments).startswith(prefix):
            sys.stderr.write(f"error: {answer}\n")
            return 1
    return (plugin if program == "kubectl-torchrun" else kubectl)(arguments)


def kubectl(arguments: list[str]) -> int:
    match arguments[0]:
        case "get" if "--watch" in arguments:
            if arguments[1] == "torchrunjob":
                return watch(lambda: {"job": JOB})
            selector = arguments[arguments.index("--selector") + 1]
            return watch(lambda: selected_pods(selector))
        case "config":
            print(_text(ROOT / "kubeconfig"))
            return 0 if (ROOT / "kubeconfig").exists() else 1
        case "get" if arguments[1] == "torchrunjobs":
            job = json.loads(_text(JOB) or "null")
            key, _, value = arguments[arguments.index("--selector") + 1].partition("=")
            labels = job["metadata"]["labels"] if job else {}
            found = key in labels and (not value or labels[key] == value)
            print(json.dumps({"items": [job] if found else []}))
        case "get" if arguments[1] == "torchrunjob" and "jsonpath" in arguments[-1]:
            print("uid-1", end="")
        case "get" if arguments[1] == "torchrunjob":
            print(JOB.read_text())
        case "get" if arguments[1] in ("rayjobs.ray.io", "pods"):
            print(_text(ROOT / f"{arguments[1]}.json"))
        case "get":
            print("", end="")
        case "delete":
            while (ROOT / "holds").exists():
                time.sleep(POLL)
            with locked():
                if JOB.exists():
                    JOB.unlink()
                    print(f'torchrunjob.torchrun.ai "{arguments[2]}" deleted')
        case "exec":
            name = arguments[2]
            pod = json.loads((PODS / f"{name}.json").read_text())
            environment = {
                **os.environ,
                "TORCHRUN_WORKSPACE_TARGET": str(ROOT / "workspace" / name),
            }
            environment["TORCHRUN_ATTEMPT"] = pod["metadata"]["labels"]["torchrun.ai/attempt"]
            command = arguments[arguments.index("--") + 1 :]
            os.execve(command[0], command, environment)
        case "create":
            (ROOT / "created").write_text(sys.stdin.read())
    return 0


def selected_pods(selector: str) -> dict[str, Path]:
    """The pods of the job that the selector names, and those without the label of a job."""
    wanted = dict(pair.split("=") for pair in selector.split(","))[JOB_NAME]
    found = {}
    for path in PODS.glob("*.json"):
        pod = json.loads(_text(path) or "null")
        if pod and pod["metadata"]["labels"].get(JOB_NAME, wanted) == wanted:
            found[path.stem] = path
    return found


def watch(files: Callable[[], dict[str, Path]]) -> int:
    known: dict[str, str] = {}
    while os.getppid() != 1:
        now = files()
        for name, path in now.items():
            text = _text(path)
            if text and text != known.get(name):
                kind = "MODIFIED" if name in known else "ADDED"
                known[name] = text
                print(json.dumps({"type": kind, "object": json.loads(text)}), flush=True)
        for name in [name for name in known if not _text(now.get(name, ROOT / "none"))]:
            print(
                json.dumps({"type": "DELETED", "object": json.loads(known.pop(name))}), flush=True
            )
        if "job" in now and not known:
            sys.stderr.write("Error from server (NotFound): no such job\n")
            return 1
        time.sleep(POLL)
    return 0


def plugin(arguments: list[str]) -> int:
    match arguments[0]:
        case "submit":
            while (ROOT / "hangs").exists():
                time.sleep(POLL)
            job = json.load(sys.stdin)
            job["metadata"]["uid"] = "uid-1"
            job["status"] = {"phase": "Queued", "reason": "Waiting", "message": "for a node"}
            with locked():
                _write(JOB, json.dumps(job))
            where = dict(itertools.pairwise(arguments))
            command = [
                sys.executable,
                __file__,
                "gang",
                where["--directory"],
                where.get("--overlay", ""),
            ]
            if not (ROOT / "slow").exists():
                prepare(job, Path(where["--directory"]), Path(where["--overlay"]))
                with (ROOT / "kubelet").open("a") as out:
                    kubelet = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                        start_new_session=True,
                    )  # fmt: skip
                (ROOT / "pids").open("a").write(f"{kubelet.pid}\n")
        case "files":
            while (ROOT / "lists").exists() and os.getppid() != 1:
                time.sleep(POLL)
            top = Path(arguments[1])
            for path in sorted(top.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    data = path.read_bytes()
                    digest = hashlib.sha256(data).hexdigest()
                    print(digest, len(data), "644", path.relative_to(top).as_posix())
        case "logs":
            with (ROOT / "log").open("a+") as log:
                log.seek(0)
                while os.getppid() != 1 and _phase() not in ("", "Succeeded", "Failed"):
                    print(log.read(), end="", flush=True)
                    time.sleep(POLL)
                print(log.read(), end="", flush=True)
        case "state-files":
            top, names = ROOT / "state", "--output=name" in arguments
            if not (top / arguments[2]).exists():
                sys.stderr.write(
                    f"Error: Job {arguments[1]} has no files at {arguments[2]} in its state directory.\n"
                )
                return 2
            for path in sorted(top.rglob("*")):
                name = str(path.relative_to(top))
                hidden = path.name.startswith(".")
                if path.is_file() and not hidden and path.is_relative_to(top / arguments[2]):
                    print(name if names else f"==> {name} <==\n{path.read_text()}\n")
    return 0


def prepare(job: dict[str, Any], directory: Path, overlay: Path) -> None:
    """Create the workspaces of the pods."""
    for index in range(job["spec"]["numNodes"]):
        place = ROOT / "workspace" / f"{job['metadata']['name']}-pod-{index}"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(directory, place, ignore=ignored)
        shutil.copytree(overlay, place, dirs_exist_ok=True)


def gang() -> None:
    """Play kubelet and controller: run the ranks and report how they ended."""
    job = json.loads(JOB.read_text())
    name_of_job = job["metadata"]["name"]
    nodes = job["spec"]["numNodes"]
    log = (ROOT / "log").open("ab")
    ranks: list[subprocess.Popen[bytes]] = []
    outputs: list[threading.Thread] = []
    pods: list[Path] = []
    for index in range(nodes):
        name = f"{name_of_job}-pod-{index}"
        environment = {
            **os.environ, "RANK": str(index), "WORLD_SIZE": str(nodes), "NODE_RANK": str(index),
            "TORCHRUN_STATE_DIR": str(ROOT / "state") if (ROOT / "state").exists() else "",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(ROOT / "workspace" / name / ".torchrun-sdk" / "run.py")],
                cwd=ROOT / "workspace" / name, env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        arguments = (index, ranks[-1], log)
        outputs.append(threading.Thread(target=copy_output, args=arguments, daemon=True))
        outputs[-1].start()
        labels = {"torchrun.ai/attempt": "0", JOB_NAME: name_of_job}
        labels["batch.kubernetes.io/job-completion-index"] = str(index)
        owners = [{"kind": "Job", "name": name_of_job, "uid": "u", "controller": True}]
        metadata = {"name": name, "labels": labels, "ownerReferences": owners}
        pod = {"metadata": metadata, "status": {"phase": "Running"}}
        pods.append(PODS / f"{name}.json")
        _write(pods[-1], json.dumps(pod))
    status(name_of_job, phase="Running", reason="WorkersRunning", message="all")
    while _name() == name_of_job and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            break
        time.sleep(POLL)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    for output in outputs:
        output.join(OUTPUT_SECONDS)
    for path in pods:
        path.unlink(missing_ok=True)
    if any(codes) or None in codes:
        first = next((index for index, code in enumerate(codes) if code), 0)
        failure = {"exitCode": codes[first], "reason": "Error", "rank": first, "node": "here"}
        status_fields = {"reason": "Error", "message": "a rank failed", "lastFailure": failure}
        status(name_of_job, phase="Failed", **status_fields)
    else:
        status(name_of_job, phase="Succeeded", reason="Completed", message="done")


def copy_output(index: int, rank: "subprocess.Popen[bytes]", log: BinaryIO) -> None:
    assert rank.stdout is not None
    for line in rank.stdout:
        log.write(b"[%d] " % index + line)
        log.flush()


def status(name: str, **changed: object) -> None:
    """The status of this job, if it was not replaced."""
    with locked():
        if _name() == name:
            job = json.loads(JOB.read_text())
            job["status"].update(changed)
            _write(JOB, json.dumps(job))


def _name() -> str:
    return str(json.loads(_text(JOB) or '{"metadata": {}}')["metadata"].get("name", ""))


def _phase() -> str:
    return str(json.loads(_text(JOB) or '{"status": {}}')["status"].get("phase", ""))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    if sys.argv[1] == "gang":
        gang()
    else:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
