"""The upload protocol over real connections: complete, cut, slow, invalid and concurrent."""

import asyncio
import json
import os
import queue
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from torchrun_runtime.sync import receive
from torchrun_runtime.sync.claim import Claim, Marker
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.server import TOKEN_HEADER, UploadServer
from torchrun_runtime.sync.settings import ArchiveLimits
from unit.runtime import hostile
from unit.runtime.syncing import TOKEN, Client, Pod, archive, digest, listening, pod, settings

CODE = archive({"train.py": b"print('hello')", "pkg/data.bin": random.Random(0).randbytes(300_000)})
NOTHING = {"sha256": "", "offset": 0, "workspace": "", "missing": [], "base": "", "revision": 0}


def prepared(directory: Path) -> Claim:
    claim = Claim(directory)
    claim.prepare()
    return claim


def finished(running: Pod) -> Marker:
    result = running.end()
    assert isinstance(result, Marker), result
    return result


def test_accepts_an_archive_in_one_piece(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        assert server.get("/readyz") == {"ready": True}
        assert server.get() == {**NOTHING, "state": "waiting"}
        assert server.put(CODE) == (202, {"state": "extracting"})
        assert server.until("done") == {
            **NOTHING,
            "state": "done",
            "sha256": digest(CODE),
            "offset": len(CODE),
            "revision": 1,
        }
        marker = finished(server)
    claim = tmp_path / "claim"
    assert (claim / "revisions/1/tree/train.py").read_text() == "print('hello')"
    assert (marker.sha256, marker.files, marker.bytes) == (digest(CODE), 2, 300_014)
    assert {path.name for path in claim.iterdir()} == {"env", "revisions", "state", ".sync_success"}


def test_accepts_an_archive_in_pieces_and_returns_the_offset(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        assert server.put(CODE, 0, 1000) == (200, {"offset": 1000})
        assert server.get() == {
            **NOTHING,
            "state": "receiving",
            "sha256": digest(CODE),
            "offset": 1000,
        }
        status, body = server.put(CODE, 0, 1000)
        assert (status, body["offset"]) == (409, 1000)
        status, body = server.put(CODE, 2000)
        assert (status, body["offset"]) == (409, 1000)
        assert server.put(CODE, 1000)[0] == 202
        assert finished(server).files == 2


def test_resumes_after_broken_connections(tmp_path: Path) -> None:
    randomness = random.Random(1)
    with pod(settings(tmp_path / "claim")) as server:
        while (held := int(str(server.get()["offset"]))) < len(CODE):
            cut = randomness.randint(1, 60_000)
            connection = server.begin(CODE, held, cut)
            while int(str(server.get()["offset"])) < min(held + cut, len(CODE)):
                pass
            if held + cut >= len(CODE):
                assert connection.getresponse().status == 202
            connection.close()
        assert finished(server).files == 2


def test_a_silent_connection_does_not_block_others(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        silent = server.begin(CODE, 0, 5000)
        while server.get()["offset"] != 5000:
            pass
        assert server.put(CODE, 5000)[0] == 202
        assert finished(server).files == 2
        silent.close()


def test_a_refusal_reaches_a_client_that_is_still_sending(tmp_path: Path) -> None:
    large = bytes(16 << 20)
    with pod(settings(tmp_path / "claim")) as server:
        status, body = server.put(large, start=1)
        assert (status, body["offset"]) == (409, 0)
    # The end of a pending one would be reported within a later test.
    assert not asyncio.all_tasks(server.server._loop)


def test_closes_a_silent_connection(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        silent = server.begin(CODE, 0, 5000)
        while server.get()["offset"] != 5000:
            pass
        server.set_read_timeout(0.2)
        with suppress(ConnectionError):  # closed before this byte, if it comes late
            silent.send(CODE[5000:5001])
            assert silent.sock.recv(1) == b""
        silent.close()
        server.set_read_timeout(60)
        assert server.put(CODE, int(str(server.get()["offset"])))[0] == 202
        assert finished(server).files == 2


def test_answers_during_an_upload(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        slow = server.begin(CODE, 0, 100)
        for _ in range(20):
            assert server.get()["state"] in ("waiting", "receiving")
        slow.send(CODE[100:])
        assert slow.getresponse().status == 202
        slow.close()


def test_two_clients_at_once_still_make_one_workspace(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:

        def upload() -> None:
            while (state := server.get())["state"] in ("waiting", "receiving"):
                start = int(str(state["offset"]))
                server.put(CODE, start, start + 20_000)

        threads = [threading.Thread(target=upload) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert finished(server).sha256 == digest(CODE)


def test_refuses_wrong_bytes_and_waits_for_a_retry(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        status, body = server.put(CODE, sha256=digest(b"other"))
        assert (status, body["reason"]) == (422, "DigestMismatch")
        state = server.get()
        assert (state["state"], state["offset"], state["reason"]) == (
            "waiting", 0, "DigestMismatch"
        )  # fmt: skip
        assert server.put(CODE)[0] == 202
        assert finished(server).files == 2


def test_accepts_only_the_archive_that_the_job_names(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", sha256=digest(CODE))) as server:
        status, body = server.put(archive({"other.py": b""}))
        assert (status, body["reason"]) == (422, "WrongArchive")
        assert server.put(CODE)[0] == 202
        assert finished(server).sha256 == digest(CODE)


BAD = hostile.build({"fine": b"x"}, hostile.HOSTILE["parent"], first=False)


def test_a_refused_archive_is_explained_and_another_accepted(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        assert server.put(BAD)[0] == 202
        state = server.until("failed")
        assert (state["reason"], state["offset"]) == ("InvalidFile", 0)
        assert state["sha256"] == digest(BAD)
        assert "'../x'" in str(state["message"])
        assert server.put(CODE)[0] == 202
        assert finished(server).files == 2
    assert {path.name for path in (tmp_path / "claim").iterdir()} == {
        "env",
        "revisions",
        "state",
        ".sync_success",
    }


def test_a_refused_archive_that_the_job_names_ends_the_pod(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", sha256=digest(BAD))) as server:
        assert server.put(BAD)[0] == 202
        failure = server.end()
        assert isinstance(failure, SyncError)
        assert (failure.reason, failure.permanent) == ("InvalidFile", True)
        assert server.get()["state"] == "failed"


@pytest.mark.parametrize(("data", "state"), [(CODE, "done"), (BAD, "failed")])
def test_it_waits_for_a_client_that_reads_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, state: str
) -> None:
    servers: queue.Queue[UploadServer] = queue.Queue()

    def make(*arguments: Any) -> UploadServer:
        server = UploadServer(*arguments)
        servers.put(server)
        return server

    monkeypatch.setattr(receive, "UploadServer", make)
    changes = {"host": "127.0.0.1", "port": 0, "sha256": digest(data), "linger": 600.0}
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(receive.receive, settings(tmp_path / "claim", **changes))
        server = servers.get(timeout=120)
        client = Client(server.port)
        assert client.put(data)[0] == 202
        while not server._handlers._workflow.final:
            time.sleep(0.01)
        assert client.get()["state"] == state
        assert isinstance(result.exception(120), SyncError) is (state == "failed")


def test_an_existing_archive_is_not_accepted_again(tmp_path: Path) -> None:
    workflow = receive.open_workflow(settings(tmp_path / "claim"), prepared(tmp_path / "claim"))
    with listening(settings(tmp_path / "claim"), workflow) as server:
        client = Client(server.port)
        assert client.put(CODE)[0] == 202
        assert client.get()["state"] == "extracting"
        assert client.put(CODE)[0] == 409
        status, body = client.put(archive({"other.py": b""}))
        assert (status, body["reason"]) == (503, "Busy")


def test_size_limits_and_full_disks_have_their_own_statuses(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", limits=ArchiveLimits(bytes=2**55))) as server:
        for total, status, reason in (
            (2**56, 413, "WorkspaceTooLarge"),
            (2**54, 507, "WorkspaceFull"),
        ):
            headers = {"Content-Range": f"bytes 0-0/{total}", "X-Torchrun-Sha256": "0" * 64}
            answer = server.request("PUT", "/v1/upload", b"x", dict(headers))
            assert (answer[0], answer[1]["reason"]) == (status, reason)


def test_idle_connections_do_not_keep_uploads_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrun_runtime.sync.server._UNAUTHENTICATED", 64)
    with pod(settings(tmp_path / "claim")) as server:
        upload = server.begin(CODE, 0, 5000)
        while server.get()["offset"] != 5000:
            pass
        flood = [
            socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(80)
        ]
        assert server.get("/readyz") == {"ready": True}
        first = [connection for connection in flood[:16] if connection.recv(1) == b""]
        assert len(first) == 16, "the oldest connections are closed"
        upload.send(CODE[5000:])
        assert upload.getresponse().status == 202, "but no running upload"
        upload.close()
        for connection in flood:
            connection.close()
        assert finished(server).files == 2


def test_a_connection_without_a_request_is_closed(tmp_path: Path) -> None:
    with pod(settings(tmp_path / "claim", read_timeout=0.2)) as server:
        for data in (b"", b"GET /readyz HTTP/1.1\r\nHost:"):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=60) as silent,
                suppress(ConnectionError),  # closed before these bytes, if they come late
            ):
                silent.sendall(data)
                assert silent.recv(1) == b""


EVIL = archive({"train.py": b"print('not yours')"})


@pytest.mark.parametrize("wanted", ["", digest(CODE)], ids=["any", "one"])
@pytest.mark.parametrize("token", ["", digest(TOKEN.encode())], ids=["no token", "token"])
@pytest.mark.parametrize("shown", [{}, {TOKEN_HEADER: "guessed"}], ids=["nothing", "guessed"])
def test_a_request_without_the_token_gets_and_changes_nothing(
    tmp_path: Path, wanted: str, token: str, shown: dict[str, str]
) -> None:
    """A request without the token, in each state of an upload. The owner continues afterwards."""
    proof = {TOKEN_HEADER: TOKEN} if token else {"X-Torchrun-Sha256": wanted}
    with pod(settings(tmp_path / "claim", sha256=wanted, token_sha256=token)) as server:
        owner, stranger = Client(server.port, proof=proof), Client(server.port, proof=shown)
        if wanted or token:
            assert owner.put(CODE, 0, 1000)[0] == 200
        named = {"X-Torchrun-Workspace": digest(b"other")}
        answers = [
            stranger.put(EVIL),
            stranger.put(CODE, 0, 1000, sha256=digest(EVIL)),
            stranger.request("PUT", "/v1/manifest", b"x", dict(named)),
            stranger.request("GET", "/v1/upload"),
        ]
        reasons = {str(body["reason"]) for _, body in answers}
        assert {status for status, _ in answers} == {403}
        assert reasons == {"UploadDenied"}
        assert not any(digest(CODE) in str(body) for _, body in answers)
        if wanted or token:
            assert owner.put(CODE, 1000)[0] == 202, "the upload keeps its offset"
            assert finished(server).sha256 == digest(CODE)


def test_strangers_do_not_fill_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pod(settings(tmp_path / "claim")) as server:
        stranger = Client(server.port, proof={})
        for _ in range(5):
            assert stranger.request("GET", "/v1/upload")[0] == 403
            assert stranger.request("GET", "/elsewhere")[0] == 404
        for _ in range(2):
            assert server.put(CODE, sha256=digest(b"other"))[0] == 422
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    refused = [line["status"] for line in lines if line["event"] == "upload refused"]
    assert refused == [403, 422, 422]


def test_listens_on_both_families(tmp_path: Path) -> None:
    workflow = receive.open_workflow(settings(tmp_path / "claim"), prepared(tmp_path / "claim"))
    with listening(settings(tmp_path / "claim"), workflow, "") as server:
        assert Client(server.port).get()["state"] == "waiting"
        if socket.has_dualstack_ipv6() and os.path.exists("/proc/net/if_inet6"):
            with socket.create_connection(("::1", server.port), timeout=60) as connection:
                connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                assert b"200" in connection.recv(100)
