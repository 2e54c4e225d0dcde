"""The lifecycle of a release on a real API server: adopt, upgrade, uninstall, install again."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from integration.bodies import job
from integration.charts import CHART, MANIFESTS, RELEASE, helm
from integration.controller_process import eventually
from torchrun_cluster import LocalCluster, Size

NAMESPACE = "torchrun-system"
JOBS = "torchrunjobs.torchrun.ai"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(name=f"test-chart-{os.getpid()}", size=Size.CONTROL_PLANE) as running:
        yield running


def run(cluster: LocalCluster, *arguments: str) -> None:
    ended = helm(*arguments, "-n", NAMESPACE, kubeconfig=cluster.kubeconfig)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def columns(cluster: LocalCluster) -> list[str]:
    crd = json.loads(cluster.kubectl("get", "crd", JOBS, "-o", "json").stdout)
    return [c["name"] for c in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


def named(cluster: LocalCluster, kind: str, *options: str) -> set[str]:
    listed = json.loads(cluster.kubectl("get", kind, *options, "-o", "json").stdout)["items"]
    return {item["metadata"]["name"] for item in listed}


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """An older chart, without the column Reason."""
    chart = Path(shutil.copytree(CHART, tmp_path / "chart"))
    path = chart / "files" / "crd" / f"{JOBS}.yaml"
    crd = yaml.safe_load(path.read_text())
    version = crd["spec"]["versions"][0]
    version["additionalPrinterColumns"] = [
        column for column in version["additionalPrinterColumns"] if column["name"] != "Reason"
    ]
    path.write_text(yaml.safe_dump(crd))
    return chart


def test_jobs_stay_after_uninstall_and_install(cluster: LocalCluster, older: Path) -> None:
    run(cluster, "install", RELEASE, str(older), "--create-namespace")
    assert "Reason" not in columns(cluster)
    text = json.dumps(job("stays"))
    # Helm does not wait until the API server serves the kind.
    create = ("create", "-f", "-")
    eventually("created", lambda: not cluster.kubectl(*create, stdin=text, check=False).returncode)
    uid = ("get", "torchrunjob", "stays", "-o", "jsonpath={.metadata.uid}")
    before = cluster.kubectl(*uid).stdout

    run(cluster, "upgrade", RELEASE, str(CHART))
    assert "Reason" in columns(cluster)

    run(cluster, "uninstall", RELEASE)
    assert named(cluster, "deployments", "-n", NAMESPACE) == set()
    assert "torchrun-view" not in named(cluster, "clusterroles")
    assert cluster.kubectl(*uid).stdout == before

    run(cluster, "install", RELEASE, str(CHART))
    assert cluster.kubectl(*uid).stdout == before

    run(cluster, "uninstall", RELEASE)


def test_helm_adopts_objects_of_kubectl_apply(cluster: LocalCluster) -> None:
    cluster.kubectl("apply", "--server-side", "-k", str(MANIFESTS))
    uid = ("get", "deployment", "-n", NAMESPACE, RELEASE, "-o", "jsonpath={.metadata.uid}")
    before = cluster.kubectl(*uid).stdout
    run(cluster, "upgrade", "--install", "--take-ownership", RELEASE, str(CHART))
    assert cluster.kubectl(*uid).stdout == before


def strategy(cluster: LocalCluster) -> dict[str, object]:
    read = ("get", "deployment", "-n", NAMESPACE, RELEASE, "-o", "jsonpath={.spec.strategy}")
    return json.loads(cluster.kubectl(*read).stdout)  # type: ignore[no-any-return]


def test_a_release_turns_its_election_off_and_on(cluster: LocalCluster) -> None:
    off = ("--set=settings.leaderElection=false", "--set=replicas=1")
    adopt = ("upgrade", "--install", "--take-ownership", "--create-namespace")
    run(cluster, *adopt, RELEASE, str(CHART))
    assert strategy(cluster)["type"] == "RollingUpdate"
    run(cluster, "upgrade", RELEASE, str(CHART), *off)
    assert strategy(cluster) == {"type": "Recreate"}
    run(cluster, "upgrade", RELEASE, str(CHART), "--reset-values")
    assert strategy(cluster)["type"] == "RollingUpdate"


def test_an_overlay_turns_the_election_off(cluster: LocalCluster, tmp_path: Path) -> None:
    """Server-side apply keeps the default rollingUpdate, which is invalid beside Recreate."""
    cluster.kubectl("delete", "deployment", "-n", NAMESPACE, "--all")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(MANIFESTS))
    where = os.path.relpath(MANIFESTS, tmp_path)
    change = {"spec": {"replicas": 1, "strategy": {"type": "Recreate"}}}
    named = {"name": RELEASE, "namespace": NAMESPACE}
    patch = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": named, **change}
    overlay = {"resources": [where], "patches": [{"patch": json.dumps(patch)}]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(overlay))
    apply = ("apply", "--server-side", "-k", str(tmp_path))
    assert "rollingUpdate: Forbidden" in cluster.kubectl(*apply, check=False).stderr
    change["spec"]["strategy"] = {"type": "Recreate", "rollingUpdate": None}
    cluster.kubectl(
        *("patch", "deployment", "-n", NAMESPACE, RELEASE, "--type=merge"),
        *("--field-manager=kubectl", f"--patch={json.dumps(change)}"),
    )
    cluster.kubectl(*apply)
    assert strategy(cluster) == {"type": "Recreate"}


def test_two_releases_in_a_namespace_do_not_share_pods(cluster: LocalCluster) -> None:
    """Although their Deployments have the same selector."""
    adopt = ("upgrade", "--install", "--take-ownership", "--create-namespace", "--reset-values")
    run(cluster, *adopt, RELEASE, str(CHART))
    run(cluster, "install", "other", str(CHART), "--set=crds.install=false,replicas=3")
    wanted = {RELEASE: 2, f"other-{RELEASE}": 3}
    for name, replicas in wanted.items():
        ready = f"--for=jsonpath={{.status.replicas}}={replicas}"
        where = ("-n", NAMESPACE, f"deployment/{name}")
        cluster.kubectl("wait", ready, *where, "--timeout=160s", timeout=180)

    def owned() -> list[tuple[str, int]]:
        listed = json.loads(cluster.kubectl("get", "rs", "-n", NAMESPACE, "-o", "json").stdout)
        return sorted(
            (item["metadata"]["ownerReferences"][0]["name"], item["status"]["replicas"])
            for item in listed["items"]
            if item["spec"]["replicas"]
        )

    eventually("each has its own", lambda: owned() == sorted(wanted.items()))
    run(cluster, "uninstall", "other")


def test_crds_are_deleted_on_request(cluster: LocalCluster) -> None:
    """The last test: an API server may take minutes to delete a CRD that has changed before."""
    adopt = ("upgrade", "--install", "--take-ownership", "--create-namespace", "--reset-values")
    run(cluster, *adopt, RELEASE, str(CHART), "--set=crds.keep=false")
    run(cluster, "uninstall", RELEASE)
    listed = json.loads(cluster.kubectl("get", "crds", "-o", "json").stdout)["items"]
    kept = {crd["metadata"]["name"] for crd in listed if "deletionTimestamp" not in crd["metadata"]}
    assert JOBS not in kept
