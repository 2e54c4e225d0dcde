import subprocess
import sys
from pathlib import Path

import pytest

from torchrun_controller.leader import Durations
from torchrun_controller.settings import OPTIONS, Settings, SettingsError, parse

IMAGE = "--runtime-image=example.com/runtime:1"


@pytest.fixture(autouse=True)
def outside_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrun_controller.settings._OWN_NAMESPACE", tmp_path / "none")


def settings(*argv: str, **environ: str) -> Settings:
    return parse([IMAGE, *argv], environ)


def test_the_defaults() -> None:
    assert settings() == Settings(
        runtime_image="example.com/runtime:1",
        runtime_image_pull_policy="IfNotPresent",
        namespace="",
        workers=16,
        kubeconfig=None,
        context=None,
        leader_election=True,
        lease_name="torchrun-controller",
        lease_namespace="default",
        lease_durations=Durations(lease=15, renew_deadline=10, retry=2, jitter=1.2),
        listen_address="",
        listen_port=8080,
        admit_by_nodes=True,
        cohort_namespaces=(),
        kai_quota_namespaces=(),
        node_overhead={},
        etcd_endpoint="",
        progress_url="",
        docs_url="",
        progress_port=8081,
        metrics_jobs=0,
        log_level="info",
        log_format="auto",
        uvloop=True,
    )


def test_every_setting_by_flag_and_by_variable(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.touch()
    environment = {
        "runtime_image": "localhost:5000/a/b@sha256:" + "0" * 64,
        "runtime_image_pull_policy": "Always",
        "namespace": " team-a ",
        "workers": "3",
        "kubeconfig": str(kubeconfig),
        "context": "kind",
        "leader_election": "false",
        "lease_name": "a.b",
        "lease_namespace": "system",
        "lease_duration": "1m",
        "lease_renew_deadline": "40",
        "lease_retry_period": "500ms",
        "listen_address": "::1",
        "listen_port": "0",
        "admit_by_nodes": "false",
        "cohort_namespaces": "prod,research",
        "kai_quota_namespaces": "research",
        "etcd_endpoint": "etcd.infra.svc:2379",
        "node_overhead": "cpu=1500m, memory=8Gi,pods=10,",
        "progress_url": "http://controller.system.svc:8081/",
        "docs_url": "https://docs.example.com/torchrun/",
        "progress_port": "9000",
        "metrics_jobs": "20",
        "log_level": "debug",
        "log_format": "json",
        "uvloop": "False",
    }
    expected = Settings(
        runtime_image=environment["runtime_image"],
        runtime_image_pull_policy="Always",
        namespace="team-a",
        workers=3,
        kubeconfig=str(kubeconfig),
        context="kind",
        leader_election=False,
        lease_name="a.b",
        lease_namespace="system",
        lease_durations=Durations(lease=60, renew_deadline=40, retry=0.5),
        listen_address="::1",
        listen_port=0,
        admit_by_nodes=False,
        cohort_namespaces=("prod", "research"),
        kai_quota_namespaces=("research",),
        node_overhead={"cpu": 1500, "memory": 8 << 30, "pods": 10},
        etcd_endpoint="etcd.infra.svc:2379",
        progress_url="http://controller.system.svc:8081",
        docs_url="https://docs.example.com/torchrun",
        progress_port=9000,
        metrics_jobs=20,
        log_level="debug",
        log_format="json",
        uvloop=False,
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in environment.items()]
    assert parse(flags, {}) == expected
    assert (
        parse([], {f"TORCHRUN_{name.upper()}": value for name, value in environment.items()})
        == expected
    )


def test_a_flag_wins_over_a_variable() -> None:
    assert settings("--workers=2", TORCHRUN_WORKERS="nonsense").workers == 2


def test_an_empty_variable_is_not_set() -> None:
    assert settings(TORCHRUN_WORKERS="", TORCHRUN_UVLOOP="").workers == 16


@pytest.mark.parametrize(("argv", "on"), [(["--uvloop"], True), (["--uvloop=false"], False)])
def test_a_switch_may_stand_alone(argv: list[str], on: bool) -> None:
    assert settings(*argv, TORCHRUN_UVLOOP="true").uvloop is on


@pytest.mark.parametrize(
    "image", ["a", "a:1", "host:5000/a/b_c:v1.0-x", "a/b@sha256:" + "a" * 64, "A.example/b"]
)
def test_images_that_are_fine(image: str) -> None:
    assert parse([f"--runtime-image={image}"], {}).runtime_image == image


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--workers=0"], "--workers (TORCHRUN_WORKERS) is '0': it must be an integer from 1"),
        (["--workers=many"], "is 'many': it must be an integer"),
        (["--workers=1.5"], "is '1.5': it must be"),
        (["--listen-port=70000"], "is '70000': it must be an integer from 0 to 65535"),
        (["--progress-url=controller:8081"], "it must be a URL such as http://torchrun-controller"),
        (["--progress-url=http://a:b@c"], "it must be a URL such as http"),
        (["--progress-url=http://c:99999"], "it must be a URL such as http"),
        (["--listen-address=localhost:80"], "is 'localhost:80': it must be an IP address"),
        (["--uvloop=maybe"], "--uvloop (TORCHRUN_UVLOOP) is 'maybe': it must be true or false"),
        (["--namespace=a,b"], "is 'a,b': it must be the name of a namespace"),
        (["--node-overhead=cpu"], "is 'cpu': it must be amounts such as cpu=2,memory=8Gi"),
        (["--etcd-endpoint=http://etcd:2379"], "it must be host:port"),
        (["--etcd-endpoint=etcd"], "it must be host:port"),
        (["--node-overhead==1"], "is '=1': it must be amounts"),
        (["--node-overhead=cpu=-1"], "is 'cpu=-1': it must be amounts"),
        (["--node-overhead=cpu=1,cpu=2"], "is 'cpu=1,cpu=2': it must be amounts"),
        (["--lease-name=A b"], "is 'A b': it must be a lowercase DNS name"),
        (["--lease-namespace=a.b"], "is 'a.b': it must be the name of a namespace"),
        (["--lease-duration=soon"], "is 'soon': it must be a duration such as 15s"),
        (["--lease-duration=-5s"], "is '-5s': it must be a duration"),
        (
            ["--lease-duration=9s"],
            "are 9s/10s/2s: the lease duration must be longer than the renew",
        ),
        (["--lease-retry-period=9s"], "are 15s/10s/9s: the renew deadline must be longer than 1.2"),
        (["--log-level=loud"], "is 'loud': it must be debug, info, warning or error"),
        (["--log-format=xml"], "is 'xml': it must be auto, json or console"),
        (["--runtime-image-pull-policy=always"], "it must be Always, IfNotPresent or Never"),
        (
            ["--runtime-image=a b"],
            "--runtime-image (TORCHRUN_RUNTIME_IMAGE) is 'a b': it must be an",
        ),
        (["--runtime-image=a\nb"], "is 'a\\nb': it must be an image"),
        (["--kubeconfig=/does/not/exist"], "is '/does/not/exist': it must be the path of a file"),
        (["--worker=3"], "unrecognized arguments: --worker=3; see --help"),
        (["stray"], "unrecognized arguments: stray"),
        (["--workers"], "argument --workers: expected one argument"),
    ],
)
def test_a_wrong_setting_is_one_line_with_name_value_and_what_is_accepted(
    argv: list[str], expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(*argv)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_runtime_image_is_required() -> None:
    with pytest.raises(
        SettingsError, match=r"--runtime-image \(TORCHRUN_RUNTIME_IMAGE\) is not set"
    ):
        parse([], {})


def test_the_lease_is_in_the_pods_own_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "namespace"
    file.write_text("torchrun-system")
    monkeypatch.setattr("torchrun_controller.settings._OWN_NAMESPACE", file)
    assert settings().lease_namespace == "torchrun-system"


def test_help_teaches_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.count("TORCHRUN_") >= 17
    assert "[TORCHRUN_WORKERS; default: 16]" in text
    assert "leader election:" in text


def test_a_process_with_a_wrong_setting_ends_with_one_line_and_code_2() -> None:
    run = [sys.executable, "-m", "torchrun_controller", IMAGE, "--workers=x"]
    bad = subprocess.run(run, capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr == (
        "torchrun-controller: --workers (TORCHRUN_WORKERS) is 'x': "
        "it must be an integer from 1 to 1000\n"
    )


ANY = {"context"}  # checked when the kubeconfig is read


@pytest.mark.parametrize("name", sorted({option.name for option in OPTIONS} - ANY))
def test_each_setting_says_what_it_is_and_what_it_must_be(name: str) -> None:
    option = next(option for option in OPTIONS if option.name == name)
    message = f"{option.flag} ({option.variable}) is '? ?': it must be {option.accepted}"
    environ = {"TORCHRUN_RUNTIME_IMAGE": "i"}
    for argv, variables in (([f"{option.flag}=? ?"], {}), ([], {option.variable: "? ?"})):
        with pytest.raises(SettingsError) as caught:
            parse(argv, environ | variables)
        assert str(caught.value) == message
