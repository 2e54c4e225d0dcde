"""Writes the generated files of this folder: the dashboards, and the alerts as a PrometheusRule.

    python manifests/monitoring/generate.py

Dashboards come from *_view.py, the PrometheusRule from prometheus/alerts.yaml.
"""

import json
from pathlib import Path

import job_view
import operator_view
import team_view

HERE = Path(__file__).parent
VIEWS = {
    "operator": operator_view.VIEW,
    "team": team_view.VIEW,
    "job": job_view.VIEW,
}
RULE = """\
# Generated from prometheus/alerts.yaml by `make generate`. The operator's Prometheus must select
# this namespace and these labels (ruleSelector).
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: torchrun-controller
  namespace: torchrun-system
  labels:
    app.kubernetes.io/name: torchrun-controller
spec:
"""


def rendered() -> dict[str, str]:
    """The text of every generated file, by its path in this folder."""
    boards = {name: json.dumps(view, indent=2) + "\n" for name, view in VIEWS.items()}
    alerts = (HERE / "prometheus" / "alerts.yaml").read_text()
    rules = alerts[alerts.index("groups:") :]
    return {
        **{f"grafana/torchrun-{name}.json": text for name, text in boards.items()},
        "prometheus-rule.yaml": RULE + _indented(rules),
    }


def _indented(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join("  " + line if line.strip() else line for line in lines)


if __name__ == "__main__":
    for path, content in rendered().items():
        (HERE / path).write_text(content)
