"""``distembed serve`` as a process: what is said over HTTP, by careless and by slow clients, and how it ends."""

import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from distembed import LoadedModel
from distembed.base.errors import UserError
from distembed.serving.model_folder.reading import read_manifest
from distembed.serving.server.app import ARROW_TYPE
from distembed.serving.server.batching import ServerSettings
from distembed.serving.server.serve import serve
from tests.data.test_damage import flip_a_bit
from tests.server.asgi import post, served, stream
from tests.server.exported_models import json_rows, session_shards
from tests.server.processes import Server, serving
from tests.small_runs import distembed as command

pytestmark = pytest.mark.distributed

HEAD = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply else 0


def test_a_served_model_scores_as_predict_does(server: Server, trained: LoadedModel) -> None:
    rows = json_rows(30, seed=3)
    expected = pytest.approx(trained.predict(rows).tolist(), abs=1e-6)
    status, found = server.ask({"rows": rows})
    assert (status, found) == (200, {"prediction": expected})
    status, answer = server.ask(stream(pa.Table.from_pylist(rows)), content_type=ARROW_TYPE)
    assert status == 200 and pa.ipc.open_stream(answer).read_all()["prediction"].to_pylist() == expected
    assert server.ask([{**rows[0], "price": "much"}])[1]["rows"][0]["field"] == "price"
    for path in ("/healthz", "/readyz"):
        status, answer = server.ask(path=path)
        assert (status, answer["status"]) == (200, "ok")
    assert b"distembed_rows_total" in server.ask(path="/metrics")[1]
    assert server.ask(path="/model")[1]["task"] == "click"
    assert f"{server.port}" in server.output and "sample scores as exported" in server.output


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (HEAD + b"content-length: 2\r\n\r\n[]", {200}),
        (HEAD + b"\r\n", {400}),  # no body
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n[\r\n1\r\n]\r\n0\r\n\r\n", {200}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n[]\r\n0\r\n\r\n", {400}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n[]\r\n", {400}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n[]", {400}),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", {400}),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n1\r\n[\r\n", {400}),
        (HEAD + b"content-length: -1\r\n\r\n[]", {400}),
        (HEAD + b"content-length: two\r\n\r\n[]", {400}),
        (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n[]", {400}),
        (HEAD + b"content-length: 9999999999999999999999\r\n\r\n[]", {400}),
        (HEAD + b"content-length: 999999999\r\n\r\n[]", {413}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n200000\r\n" + b" " * 0x200000 + b"\r\n0\r\n\r\n", {413, 0}),
        (b"GET /healthz HTTP/1.0\r\n\r\n", {200}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),  # TLS
        (b"\r\n\r\nnonsense\r\n\r\n", {400}),
        (b"POST /predict HTTP/1.1\r\nbad header\r\n\r\n", {400}),
    ],
)
def test_bytes_of_any_kind_are_answered(server: Server, sent: bytes, statuses: set[int]) -> None:
    try:
        reply = server.send(sent)
    except ConnectionError:  # closed while more is sent than is read
        reply = b""
    assert status_of(reply) in (statuses | ({0} if len(sent) > 1 << 20 else set())), reply[:300]
    assert server.ask(path="/healthz")[0] == 200


def test_a_truncated_body_is_left_out_and_a_late_one_taken(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n[{")
    late = server.send(HEAD + b"content-length: 2\r\n\r\n[", 0.3, b"]")
    assert status_of(late) == 200


@pytest.mark.thorough
def test_kill_leaves_nothing_and_sigterm_waits_for_answers(model: Path, trained: LoadedModel, tmp_path: Path) -> None:
    files, rows = sorted(path for path in model.rglob("*")), json_rows(20, seed=5)
    with serving(model, tmp_path / "first") as server:
        pid, port = server.pid, server.port
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        assert not any(f"\nPPid:\t{pid}\n" in status for status in statuses())
    assert sorted(path for path in model.rglob("*")) == files
    with serving(model, tmp_path / "second", "--port", port, "--max-wait-ms", 1500) as server:  # which is free again
        assert server.port == port
        found: list[tuple[int, dict[str, list[float]]]] = []
        thread = threading.Thread(target=lambda: found.append(server.ask(rows)))
        thread.start()
        time.sleep(0.5)  # it waits for more requests
        assert server.end(signal.SIGTERM) == 0
        thread.join()
        assert found == [(200, {"prediction": pytest.approx(trained.predict(rows).tolist(), abs=1e-6)})]
        with pytest.raises(ConnectionRefusedError):
            server.ask(path="/healthz")
        assert "Traceback" not in server.output


def statuses() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            yield path.read_text()
        except OSError:  # it has ended
            continue


def test_what_cannot_be_served_is_refused_in_a_sentence(model: Path, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(UserError) as error:
            serve(folder, "127.0.0.1", 0, ServerSettings(), print)
        return str(error.value)

    assert "no exported model" in refused(tmp_path)
    damaged = Path(shutil.copytree(model, tmp_path / "damaged"))
    flip_a_bit(damaged / "network.pt2", 1000)
    assert "network.pt2 is damaged" in refused(damaged)


def test_addresses_that_are_none_are_refused(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = command("serve", model, "--port", port, code=2).stderr
    assert said.startswith("error:") and "Traceback" not in said
    assert f"--port {port} cannot be listened on" in re.sub(r"\s+", " ", said)
    for host in ("256.1.1.1", "203.0.113.1", "::g", "x" * 300, "no such host"):
        with pytest.raises(UserError, match="cannot be listened on"):
            serve(model, host, 0, ServerSettings(), print)


@pytest.mark.thorough
def test_shards_in_int8_are_served(tmp_path_factory: pytest.TempPathFactory, trained: LoadedModel) -> None:
    folder = session_shards(tmp_path_factory)
    assert len(read_manifest(folder).shards) > 1
    rows = json_rows(40, seed=6)
    reply = post(served(folder, most_rows=32), rows)
    assert reply.status == 200
    assert reply.json()["prediction"] == pytest.approx(trained.predict(rows).tolist(), abs=2e-3)
