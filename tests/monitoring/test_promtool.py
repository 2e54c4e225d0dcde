"""Checks of the files by promtool, without a cluster."""

import json
from pathlib import Path

import yaml

from monitoring.conftest import HERE, Promtool
from monitoring.shortened import ALERTS, shortened
from torchrun_controller.metrics.registry import Metrics


def test_the_rules_are_valid(promtool: Promtool, tmp_path: Path) -> None:
    assert "23 rules found" in promtool("check", "rules", str(ALERTS))
    short = tmp_path / "short.yaml"
    short.write_text(shortened())
    assert "23 rules found" in promtool("check", "rules", str(short))


def test_every_query_of_the_dashboards_parses(promtool: Promtool, tmp_path: Path) -> None:
    queries = [
        target["expr"].replace("$__rate_interval", "1m").replace("$__range", "1h")
        for board in sorted((ALERTS.parents[1] / "grafana").glob("*.json"))
        for panel in json.loads(board.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]})
    )
    output = promtool("check", "rules", "--lint=none", str(tmp_path / "rules.yaml"))
    assert f"{len(queries)} rules found" in output


def test_the_configuration_is_valid(promtool: Promtool, tmp_path: Path) -> None:
    """Without the discovery of pods, which this promtool does not support."""
    config = yaml.safe_load((ALERTS.parent / "scrape.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    del scrape["kubernetes_sd_configs"]
    assert config["rule_files"] == [ALERTS.name]
    config["rule_files"] = [str(ALERTS)]
    (tmp_path / "scrape.yaml").write_text(yaml.safe_dump(config))
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "scrape.yaml"))


def test_each_alert_fires_for_its_series(promtool: Promtool, tmp_path: Path) -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]  # promtool compares complete texts; test_run.py checks them
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules, sort_keys=False))
    cases = tmp_path / "alerts.test.yaml"
    cases.write_text((HERE / "alerts.test.yaml").read_text())
    tested = cases.read_text()
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert f"alertname: {rule['alert']}\n        exp_alerts" in tested, rule["alert"]
    assert "SUCCESS" in promtool("test", "rules", str(cases))


def test_the_metric_names_pass_lint(promtool: Promtool) -> None:
    metrics = Metrics()
    metrics.remove_queue(("", ""))
    text = metrics.snapshot().render("")[0].decode()
    assert promtool("check", "metrics", stdin=text) == ""
