"""A progress endpoint over real sockets, with an API server that plays TokenReview."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from scripted_server import connection, json_response, serving
from torchrun_api.json import JsonObject
from torchrun_controller.cache.progress_reports import ReportingWorker, Reports
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving.progress.endpoint import ProgressServer
from torchrun_controller.serving.progress.tokens import Tokens

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
JOB = ("ml", "train")
POD = ("ml", "train-0-abcde", "uid-pod")


def token(
    pod: tuple[str, str, str] = POD, audience: str = "torchrun.ai/progress", expires: float = 3600
) -> str:
    namespace, name, uid = pod
    claims = {
        "aud": [audience],
        "exp": NOW.timestamp() + expires,
        "kubernetes.io": {"namespace": namespace, "pod": {"name": name, "uid": uid}},
    }
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{payload}.signature"


@dataclass
class World:
    """The port of a controller, an API server with one valid token, and one worker."""

    port: int = 0
    leads: bool = True
    time: float = 1000.0
    workers: dict[tuple[str, str, str], ReportingWorker] = field(
        default_factory=lambda: {POD: ReportingWorker(JOB, "uid-child")}
    )
    bound_to: dict[str, tuple[str, str, str]] = field(
        default_factory=dict
    )  # other workers than POD
    good: set[str] = field(default_factory=lambda: {token()})
    audiences: list[str] = field(default_factory=lambda: ["torchrun.ai/progress"])
    review_code: int = 201
    reviews: int = 0
    accepted: list[tuple[str, str]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    reports: Reports = field(default_factory=Reports)
    observed: int = 0

    def job_of(self, namespace: str, pod: str, uid: str) -> tuple[str, str] | None:
        worker = self.workers.get((namespace, pod, uid))
        return worker.job if worker else None

    def worker(self, namespace: str, pod: str, uid: str) -> ReportingWorker | None:
        self.observed += 1
        return self.workers.get((namespace, pod, uid))

    async def review(self, request: web.BaseRequest) -> web.Response:
        self.reviews += 1
        if self.review_code != 201:
            return json_response({"message": "no"}, self.review_code)
        spec = (await request.json())["spec"]
        assert spec["audiences"] == ["torchrun.ai/progress"]
        if spec["token"] not in self.good:
            return json_response({"status": {"error": "invalid"}}, 201)
        namespace, *identity = self.bound_to.get(spec["token"], POD)
        extra: JsonObject = {
            f"authentication.kubernetes.io/pod-{k}": [v]
            for k, v in zip(("name", "uid"), identity, strict=True)
        }
        user: JsonObject = {
            "username": f"system:serviceaccount:{namespace}:default",
            "extra": extra,
        }
        status: JsonObject = {"authenticated": True, "audiences": [*self.audiences], "user": user}
        return json_response({"status": status}, 201)

    async def post(
        self, body: Any = None, authorization: str | None = None, path: str = "/v1/progress"
    ) -> tuple[int, str]:
        """The status code and the body."""
        data = body if isinstance(body, bytes) else json.dumps(body or {"step": 3}).encode()
        bearer = f"Bearer {token()}" if authorization is None else authorization
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{self.port}{path}",
                data=data,
                headers={"Authorization": bearer},
            ) as answer,
        ):
            return answer.status, await answer.text()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    world.reports = Reports(lambda: world.time)
    async with serving(world.review) as api, connection(api.url).session("review") as transport:
        server = ProgressServer(
            "127.0.0.1",
            0,
            leads=lambda: world.leads,
            tokens=Tokens(transport, clock=lambda: world.time, now=NOW.timestamp),
            workers=world,
            reports=world.reports,
            accepted=world.accepted.append,
            metrics=world.metrics,
            clock=lambda: world.time,
            now=lambda: NOW,
        )
        async with server.running():
            world.port = server.port
            yield world


@asynccontextmanager
async def connection_to(world: World) -> AsyncIterator[Tokens]:
    """A connection for token reviews, without an endpoint."""
    async with serving(world.review) as api, connection(api.url).session("review") as transport:
        yield Tokens(transport, clock=lambda: world.time, now=NOW.timestamp)
