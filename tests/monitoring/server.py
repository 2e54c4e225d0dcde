"""A Prometheus for the tests, and queries."""

import json
import math
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from integration.controller_process import eventually
from torchrun_cluster import binaries

CONFIG = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [alerts.yaml]
scrape_configs:
  - job_name: torchrun-controller
    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]
"""


class Prometheus:
    """Scrapes its targets each second and evaluates rules."""

    def __init__(self, folder: Path, rules: str) -> None:
        self._folder = folder
        self._targets: dict[str, int] = {}
        folder.mkdir(exist_ok=True)
        (folder / "prometheus.yaml").write_text(CONFIG)
        (folder / "alerts.yaml").write_text(rules)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}/api/v1", timeout=30)
        self.began = time.time()

    @contextmanager
    def running(self) -> Iterator["Prometheus"]:
        self._write_targets()
        command = [
            str(binaries.ensure(["prometheus"])["prometheus"]),
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--enable-feature=exemplar-storage",
        ]
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                eventually("Prometheus is ready", self._is_ready)
                yield self
            finally:
                process.terminate()
                process.wait(30)
                self._client.close()

    def scrape(self, name: str, port: int) -> None:
        """Add a controller as a target, or change its port after a restart."""
        self._targets[name] = port
        self._write_targets()

    def forget(self, name: str) -> None:
        """Remove a target, like a deleted pod."""
        self._targets.pop(name, None)
        self._write_targets()

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """Firing alerts by name."""
        result: dict[str, list[dict[str, Any]]] = {}
        for alert in self._get("/alerts")["alerts"]:
            if alert["state"] == "firing":
                result.setdefault(alert["labels"]["alertname"], []).append(alert)
        return result

    def fires(self, name: str, /, seconds: float = 60, **labels: str) -> dict[str, Any]:
        """Wait until the alert fires with these labels, and check its texts."""

        def look() -> dict[str, Any] | None:
            for alert in self.firing().get(name, ()):
                if labels.items() <= alert["labels"].items():
                    return alert
            return None

        alert = eventually(f"{name} {labels} fires; {sorted(self.firing())}", look, seconds)
        for text in alert["annotations"].values():
            assert "<error" not in text, text
            assert "<no value>" not in text, text
        print(f"{time.time() - self.began:5.0f} s  {name}: {alert['annotations']['summary']}")
        return alert

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The current result."""
        return self._result("/query", {"query": expr})

    def value(self, expr: str) -> float:
        """The current single value; 0 without one."""
        result = self.query(expr)
        return float(result[0]["value"][1]) if result else 0.0

    def values(self, expr: str) -> list[float]:
        """All numeric values since the start."""
        now = time.time()
        step = max(2.0, (now - self.began) / 500)
        result = self._result(
            "/query_range", {"query": expr, "start": self.began, "end": now, "step": step}
        )
        values = (float(value) for series in result for _, value in series["values"])
        return [value for value in values if not math.isnan(value)]

    def exemplars(self, expr: str) -> list[dict[str, Any]]:
        """All exemplars since the start."""
        parameters = {"query": expr, "start": self.began, "end": time.time()}
        result: list[dict[str, Any]] = self._get("/query_exemplars", parameters)
        return result

    def _result(self, path: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get(path, parameters)["result"]
        return result

    def _get(self, path: str, parameters: Mapping[str, Any] | None = None) -> Any:
        answer = self._client.get(path, params=dict(parameters or {}))
        assert answer.is_success, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def _is_ready(self) -> bool:
        try:
            return self._client.get(f"http://127.0.0.1:{self._port}/-/ready").is_success
        except httpx.TransportError:
            return False

    def _write_targets(self) -> None:
        targets = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}
            for name, port in self._targets.items()
        ]
        written = self._folder / "targets.new"
        written.write_text(json.dumps(targets))
        written.rename(self._folder / "targets.json")
