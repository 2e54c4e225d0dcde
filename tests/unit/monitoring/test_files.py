"""Static checks of dashboards and alerts. `make monitoring` runs them."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from torchrun_api.kinds.status import PHASES
from torchrun_controller.metrics import reference
from torchrun_controller.metrics.labels import CHOSEN_BY_USERS
from torchrun_controller.reconcile.model.conditions import BLOCKED_REASONS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "manifests" / "monitoring"
DASHBOARDS = sorted((FOLDER / "grafana").glob("*.json"))
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
ALERTS = [
    rule
    for group in yaml.safe_load((FOLDER / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]

# Metrics of every process, and of Prometheus itself.
OTHERS = {
    "up": {"job", "app_kubernetes_io_name"},
    "process_start_time_seconds": {"instance"},
    "process_resident_memory_bytes": {"instance"},
    "process_cpu_seconds_total": {"instance"},
    "process_open_fds": {"instance"},
}
TARGET_LABELS = {"instance", "le"}
WORDS = {
    *("sum", "max", "min", "count", "by", "on", "group_left", "and", "or", "unless"),
    *(
        "rate",
        "increase",
        "max_over_time",
        "min_over_time",
        "sort_desc",
        "timestamp",
        "deriv",
        "time",
        "vector",
        "histogram_quantile",
        "absent",
    ),
}


def known_metrics() -> dict[str, set[str]]:
    known = dict(OTHERS)
    for family in reference.families():
        suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
        for suffix in suffixes:
            known[family.name + suffix] = {*family.labels, *TARGET_LABELS}
    return known


KNOWN = known_metrics()


def queries(board: Path) -> Iterator[tuple[str, str]]:
    for panel in json.loads(board.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield f"{board.stem}: {panel['title']}", target["expr"]
    for variable in json.loads(board.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            definition = variable["definition"]
            if found := re.fullmatch(r"query_result\((.*)\)", definition):
                yield f"{board.stem}: variable", found[1]
                continue
            metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", definition).groups()  # type: ignore[union-attr]
            yield f"{board.stem}: variable", f"sum by ({label}) ({metric})"


EVERY_QUERY = [
    *((where, expr) for board in DASHBOARDS for where, expr in queries(board)),
    *((rule["alert"], rule["expr"]) for rule in ALERTS),
]


def check(expr: str) -> None:
    """Check that every metric of a query exists and has the labels of the query."""
    used: set[str] = set()
    for name, selectors in re.findall(r"([a-zA-Z_]\w*)\{([^}]*)\}", expr):
        bare = re.sub(r'"[^"]*"', '""', selectors)
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", bare))
        assert name in KNOWN, f"there is no metric {name}"
        assert labels <= KNOWN[name], f"{name} has no {labels - KNOWN[name]}"
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", expr))))
    plain = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|on|group_left) \([^)]*\)", " ", expr)
    for word in set(re.findall(r"[a-zA-Z_]\w*", plain)) - WORDS:
        assert word in KNOWN, f"there is no metric {word}"
        used.add(word)
    assert used, "the query names no metric"
    assert grouped <= set().union(*(KNOWN[name] for name in used)), f"no label {grouped}"


@pytest.mark.parametrize(("where", "expr"), EVERY_QUERY, ids=[w for w, _ in EVERY_QUERY])
def test_every_metric_and_label_exists(where: str, expr: str) -> None:
    check(expr)


@pytest.mark.parametrize(("where", "expr"), EVERY_QUERY, ids=[w for w, _ in EVERY_QUERY])
def test_metrics_with_names_of_client_go_are_those_of_this_controller(
    where: str, expr: str
) -> None:
    selected = re.findall(r"workqueue_\w+(?:\[[^]]*\]\))? and on \(instance\) torchrun_", expr)
    assert len(selected) == expr.count("workqueue_"), where


def test_no_alert_is_for_what_a_controller_of_some_namespaces_may_not_read() -> None:
    roles = yaml.safe_load_all((ROOT / "manifests/rbac/role.yaml").read_text())
    (role,) = (
        r
        for r in roles
        if r["metadata"]["name"] == "torchrun-controller-cluster" and r["kind"] == "ClusterRole"
    )
    resources = {
        ".".join(filter(None, (resource, group)))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    (expr,) = (rule["expr"] for rule in ALERTS if rule["alert"] == "TorchrunApiForbidden")
    (pattern,) = re.findall(r'unless .*\{resource=~"([^"]*)"\}', expr)
    assert set(pattern.split("|")) == {re.escape(r).replace("\\", "\\\\") for r in resources}


@pytest.mark.parametrize(
    ("alert", "reasons"),
    [("TorchrunJobsBlocked", BLOCKED_REASONS), ("TorchrunQueueNotReady", CHOSEN_BY_USERS)],
)
def test_an_alert_names_the_reasons_of_the_controller(alert: str, reasons: frozenset[str]) -> None:
    (expr,) = (rule["expr"] for rule in ALERTS if rule["alert"] == alert)
    (pattern,) = re.findall(r'reason(?:=~|!~)"([^"]*)"', expr)
    assert set(pattern.split("|")) == reasons


@pytest.mark.parametrize(
    "expr",
    ["sum(torchrun_job)", 'torchrun_jobs{phases="a"}', "sum by (queues) (torchrun_queue_jobs)"],
)
def test_a_wrong_metric_name_is_detected(expr: str) -> None:
    with pytest.raises(AssertionError):
        check(expr)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_severity_and_a_runbook(rule: dict[str, Any]) -> None:
    name, annotations = rule["alert"], rule["annotations"]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert annotations["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    section = RUNBOOKS.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    for part in ("Meaning", "Impact", "Look", "Do"):
        assert f"- **{part}:**" in section, f"docs/runbooks.md: {name} lacks {part}"


def test_every_panel_that_a_runbook_names_exists() -> None:
    titles = {
        panel["title"] for board in DASHBOARDS for panel in json.loads(board.read_text())["panels"]
    }
    looks = re.findall(r"- \*\*Look:\*\*(.*?)(?=\n- |\n\n|\Z)", RUNBOOKS, re.S)
    assert len(looks) == len(ALERTS)
    named = {name for look in looks for name in re.findall(r"\*([^*]+)\*", " ".join(look.split()))}
    assert named
    assert not named - titles


def test_every_runbook_has_an_alert() -> None:
    assert re.findall(r"^### (\w+)$", RUNBOOKS, re.M) == [rule["alert"] for rule in ALERTS]


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.stem)
def test_dashboards_are_complete(board: Path) -> None:
    model = json.loads(board.read_text())
    assert model["uid"] == board.stem
    assert model["templating"]["list"][0]["type"] == "datasource"
    panels = model["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.stem)
def test_people_read_words_and_whole_numbers(board: Path) -> None:
    for panel in json.loads(board.read_text())["panels"]:
        if panel["type"] == "row":
            continue
        defaults = panel["fieldConfig"]["defaults"]
        if defaults["unit"] == "short":
            assert defaults["decimals"] == (3 if panel["title"] == "Loss" else 0)
        if panel["type"] == "table":
            (change,) = panel["transformations"]
            names = change["options"]["renameByName"]
            assert names["Value"] != "Value", panel["title"]
            assert {"job_namespace", "queue", "reason"} <= set(names)
        if any("{{phase}}" in target["legendFormat"] for target in panel["targets"]):
            coloured = {rule["matcher"]["options"] for rule in panel["fieldConfig"]["overrides"]}
            assert {phase for phase in PHASES if not any(phase in one for one in coloured)} == set()


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("generate", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("panels", "operator_view", "team_view", "job_view"):
        sys.modules.pop(name, None)
    return module


def test_what_is_generated_is_up_to_date(generator: ModuleType) -> None:
    for path, text in generator.rendered().items():
        assert (FOLDER / path).read_text() == text, f"{path}: run make generate"


def test_the_rule_object_holds_the_alerts() -> None:
    rule = yaml.safe_load((FOLDER / "prometheus-rule.yaml").read_text())
    assert rule["kind"] == "PrometheusRule"
    alerts = [alert for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert alerts == ALERTS


def test_the_monitor_finds_the_deployments_port() -> None:
    monitor = yaml.safe_load((FOLDER / "pod-monitor.yaml").read_text())
    documents = yaml.safe_load_all((ROOT / "manifests/controller/deployment.yaml").read_text())
    deployment = next(d for d in documents if d["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert labels.items() <= template["metadata"]["labels"].items()
    assert monitor["metadata"]["namespace"] == deployment["metadata"]["namespace"]
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    assert template["metadata"]["annotations"]["prometheus.io/scrape"] == "true"


def test_the_monitor_is_for_its_namespace_and_the_scrape_for_all() -> None:
    """The chart creates a monitor for each release: a replica must not be scraped twice."""
    monitor = yaml.safe_load((FOLDER / "pod-monitor.yaml").read_text())
    assert "namespaceSelector" not in monitor["spec"]
    config = yaml.safe_load((FOLDER / "prometheus" / "scrape.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["kubernetes_sd_configs"] == [{"role": "pod"}]


def test_each_replica_is_one_target_with_any_kind_of_address() -> None:
    config = yaml.safe_load((FOLDER / "prometheus" / "scrape.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    rules = scrape["relabel_configs"]
    assert "__address__" not in [rule.get("target_label") for rule in rules]
    (port,) = (rule for rule in rules if rule.get("action") == "keepequal")
    assert port["source_labels"] == ["__meta_kubernetes_pod_container_port_number"]
    assert port["target_label"] == "__meta_kubernetes_pod_annotation_prometheus_io_port"


def test_kustomize_takes_every_dashboard() -> None:
    kustomization = yaml.safe_load((FOLDER / "Kustomization").read_text())
    (maps,) = kustomization["configMapGenerator"]
    assert sorted(maps["files"]) == [f"grafana/{board.name}" for board in DASHBOARDS]
    assert sum(board.stat().st_size for board in DASHBOARDS) < 262_144, "client-side apply"
