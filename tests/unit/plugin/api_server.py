"""An API server in memory: the requests of the plugin, with injected faults."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from torchrun_api.contract import contents
from torchrun_api.json import JsonObject, object_at
from web_server import listening

Hook = Callable[[web.Request], web.StreamResponse | None]
ROOT = "/apis/torchrun.ai/v1alpha1/namespaces/ns"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
CORE = "/api/v1/namespaces/ns"


def refusal(code: int, message: str, **details: object) -> web.Response:
    """A metav1.Status."""
    status = {"kind": "Status", "code": code, "message": message, "details": details}
    return web.json_response(status, status=code)


class ApiServer:
    """One namespace. `hooks` see each request first and may respond; each returns None to pass.

    `logs`: lines by pod, of other containers than trainer by `POD/CONTAINER`. `uploaded`: what the
    only sync pod has taken. `on_create`, `on_upload`: play the controller. Methods may be called
    from any thread.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], JsonObject] = {}
        self.hooks: list[Hook] = []
        self.logs: dict[str, list[str]] = {}
        self.uploaded = bytearray()
        self.announced: contents.Manifest | None = None
        self.on_create: Callable[[str], None] = lambda name: None
        self.on_upload: Callable[[], None] = lambda: None
        self.on_patch: Callable[[], None] = lambda: None
        self.requests: list[str] = []
        self.forbidden: frozenset[str] = frozenset()  # as "pods/exec create"
        self._version = 0
        self._watchers: list[tuple[str, asyncio.Queue[JsonObject | None]]] = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._lock = threading.RLock()
        self.url = ""

    def put(self, plural: str, name: str, **parts: object) -> None:
        """Add an object, or change parts of it."""
        with self._lock:
            self._version += 1
            known = self.objects.get((plural, name))
            metadata: JsonObject = {"name": name, "namespace": "ns", "uid": f"uid-{name}"}
            changed: JsonObject = json.loads(json.dumps(parts))
            body: JsonObject = {**(known or {"metadata": metadata}), **changed}
            body["metadata"] = {
                **metadata,
                **(known or {}).get("metadata", {}),  # type: ignore[dict-item]
                **changed.get("metadata", {}),  # type: ignore[dict-item]
                "resourceVersion": str(self._version),
            }
            self.objects[plural, name] = body
            self._send(plural, {"type": "MODIFIED" if known else "ADDED", "object": body})

    def delete(self, plural: str, name: str) -> None:
        """Remove an object."""
        with self._lock:
            body = self.objects.pop((plural, name))
            self._send(plural, {"type": "DELETED", "object": body})

    def disturb_watches(self, event: JsonObject | None) -> None:
        """Send every watch an event, or end it."""
        with self._lock:
            for plural in ("torchrunjobs", "pods"):
                self._send(plural, event)

    def _send(self, plural: str, event: JsonObject | None) -> None:
        for watched, queue in self._watchers:
            if watched == plural:
                self._loop.call_soon_threadsafe(queue.put_nowait, event)

    @contextmanager
    def running(self) -> Iterator["ApiServer"]:
        """Serve in a thread."""
        thread = threading.Thread(target=self._serve)
        thread.start()
        assert self._started.wait(60)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = asyncio.Event()
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._first])
        app.router.add_get(ROOT + "/{plural}", self._list)
        app.router.add_post(ROOT + "/{plural}", self._create)
        app.router.add_get(ROOT + "/{plural}/{name}", self._get)
        app.router.add_patch(ROOT + "/{plural}/{name}", self._patch)
        app.router.add_delete(ROOT + "/{plural}/{name}", self._delete)
        app.router.add_get("/apis/torchrun.ai/v1alpha1/{plural}", self._list)
        app.router.add_post(REVIEWS, self._review)
        app.router.add_get(CORE + "/{plural}", self._list)
        app.router.add_get(CORE + "/{plural}/{name}", self._get)
        app.router.add_post(CORE + "/{plural}", self._create_core)
        app.router.add_delete(CORE + "/{plural}/{name}", self._delete)
        app.router.add_get(CORE + "/pods/{name}/log", self._log)
        app.router.add_get(CORE + "/pods/{name}:8080/proxy/v1/upload", self._ask)
        app.router.add_put(CORE + "/pods/{name}:8080/proxy/v1/upload", self._take)
        app.router.add_put(CORE + "/pods/{name}:8080/proxy/v1/manifest", self._announce)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        async with listening(runner) as port:
            self.url = f"http://127.0.0.1:{port}"
            self._started.set()
            await self._stop.wait()
            self.disturb_watches(None)

    @web.middleware
    async def _first(
        self, request: web.Request, handler: Callable[[web.Request], object]
    ) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        for hook in self.hooks:
            answer = hook(request)
            if answer is not None:
                return answer
        return await handler(request)  # type: ignore[misc,no-any-return]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        plural = request.match_info["plural"]
        chosen = _selector(request.query)
        if request.query.get("watch"):
            return await self._watch(request, plural, chosen)
        with self._lock:
            items = [b for (p, _), b in self.objects.items() if p == plural and chosen(b)]
            version = str(self._version)
        return web.json_response({"metadata": {"resourceVersion": version}, "items": items})

    async def _watch(
        self, request: web.Request, plural: str, chosen: Callable[[JsonObject], bool]
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        queue: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        with self._lock:
            for (kind, _), body in self.objects.items():
                if kind == plural and int(body["metadata"]["resourceVersion"]) > since:  # type: ignore[index,call-overload,arg-type]
                    queue.put_nowait({"type": "MODIFIED", "object": body})
            self._watchers.append((plural, queue))
        await response.prepare(request)
        await response.write(b'{"type":"BOOKMARK","object":{"metadata":{}}}\n')
        try:
            while (event := await queue.get()) is not None:
                seen = event["object"]
                if event["type"] == "ERROR" or (isinstance(seen, dict) and chosen(seen)):
                    await response.write(json.dumps(event).encode() + b"\n")
        finally:
            with self._lock:  # another thread may be sending to all
                self._watchers.remove((plural, queue))
        return response

    async def _get(self, request: web.Request) -> web.Response:
        plural, name = request.match_info["plural"], request.match_info["name"]
        body = self.objects.get((plural, name))
        if body is None:
            return refusal(404, f'{plural} "{name}" not found', name=name, kind=plural)
        return web.json_response(body)

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = str(body["metadata"]["name"])
        if ("torchrunjobs", name) in self.objects:
            return refusal(409, f'torchrunjobs "{name}" already exists', name=name)
        if request.query.get("dryRun") != "All":
            self.put("torchrunjobs", name, **body)
            self.on_create(name)
        return web.json_response(body, status=201)

    async def _review(self, request: web.Request) -> web.Response:
        attributes = (await request.json())["spec"]["resourceAttributes"]
        name = "/".join(
            part for part in (attributes["resource"], attributes["subresource"]) if part
        )
        allowed = f"{name} {attributes['verb']}" not in self.forbidden
        return web.json_response({"status": {"allowed": allowed}}, status=201)

    async def _create_core(self, request: web.Request) -> web.Response:
        body = await request.json()
        plural, name = request.match_info["plural"], str(body["metadata"]["name"])
        if (plural, name) in self.objects:
            return refusal(409, f'{plural} "{name}" already exists', name=name)
        self.put(plural, name, **body)
        return web.json_response(body, status=201)

    async def _delete(self, request: web.Request) -> web.Response:
        plural, name = request.match_info["plural"], request.match_info["name"]
        if (plural, name) not in self.objects:
            return refusal(404, f'{plural} "{name}" not found', name=name, kind=plural)
        if request.query.get("dryRun") != "All":
            self.delete(plural, name)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _patch(self, request: web.Request) -> web.Response:
        name, changed = request.match_info["name"], await request.json()
        if "annotations" in changed.get("metadata", {}):
            known = object_at(
                object_at(self.objects["torchrunjobs", name], "metadata"), "annotations"
            )
            changed["metadata"]["annotations"] = {**known, **changed["metadata"]["annotations"]}
        if request.query.get("dryRun") != "All":
            self.put("torchrunjobs", name, **changed)
            self.on_patch()
        return web.json_response({**self.objects["torchrunjobs", name], **changed})

    async def _log(self, request: web.Request) -> web.Response:
        pod, container = request.match_info["name"], request.query["container"]
        lines = self.logs.get(pod if container == "trainer" else f"{pod}/{container}")
        if lines is None:
            return refusal(404, "pod not found", name="x")
        since = request.query.get("sinceTime", "")
        lines = [line for line in lines if line[:19] >= since[:19]]
        tail = int(request.query.get("tailLines", len(lines)))
        return web.Response(text="".join(lines[len(lines) - min(tail, len(lines)) :]))

    async def _ask(self, _: web.Request) -> web.Response:
        state = {
            "state": "done" if self.uploaded else "waiting",
            "sha256": self._sha if self.uploaded else "",
            "offset": len(self.uploaded),
            "workspace": self.announced.sha256 if self.announced else "",
            "missing": [[0, len(self.announced.entries) - 1]] if self.announced else [],
            "revision": 1,
        }
        return web.json_response(state)

    async def _announce(self, request: web.Request) -> web.Response:
        self.announced = contents.unpack(await request.read(), {})
        return web.json_response({"state": "comparing"}, status=202)

    async def _take(self, request: web.Request) -> web.Response:
        self._sha = request.headers["X-Torchrun-Sha256"]
        self.uploaded.extend(await request.read())
        self.on_upload()
        return web.json_response({"state": "extracting"}, status=202)


def _selector(query: Mapping[str, str]) -> Callable[[JsonObject], bool]:
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    text = query.get("labelSelector", "")
    key, one_of, values = text.partition(" in ")
    if one_of:
        members = values.strip("()").split(",")
        return lambda body: object_at(object_at(body, "metadata"), "labels").get(key) in members
    pairs = [pair.split("=") for pair in text.split(",") if pair]

    def chosen(body: JsonObject) -> bool:
        metadata = object_at(body, "metadata")
        labels = object_at(metadata, "labels")
        return name in ("", metadata["name"]) and all(labels.get(k) == v for k, v in pairs)

    return chosen
