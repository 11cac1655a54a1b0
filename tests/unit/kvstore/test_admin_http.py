"""The administration service over HTTP: who is let in, what is answered, what is refused."""

from __future__ import annotations

import re
import secrets
import select
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from pydantic import ValidationError

from configs.kvstore_admin import KVAdminConfig
from configs.schema import TransferConfig
from kvstore import KVStoreError
from kvstore.admin import http_app, patient_protocol
from kvstore.admin.admin_server import AdminServer
from kvstore.admin.metrics import METRICS, NODE_EVENTS, CountsCollector
from kvstore.admin.remote_admin import RemoteAdmin
from kvstore.admin.reports import VerifyOptions, VerifyState
from kvstore.admin.tokens import authorizes, read_token
from kvstore.admin.verifier import Verifier
from kvstore.errors import AdminRefused, AdminTokenInvalid, AdminUnavailable
from kvstore.wire import messages as m
from tests.support.scripted_master import SECRET, ScriptedMaster, figures, segment
from tests.support.waits import eventually

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore-admin.md"
TOKEN = secrets.token_hex(16)


def token_file(folder: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def master():
    keys = [secrets.token_bytes(16) for _ in range(5)]
    with ScriptedMaster(
        keys,
        segments=[segment("first"), segment("second", 1)],
        tenants=[m.TenantFigures("team", 1000, 10, 1)],
        statistics=figures(
            blocks=5, hit_blocks=3, missed_blocks=1, free_bytes=77, no_space_blocks=9
        ),
    ) as master:
        yield master


@pytest.fixture
def server(master, tmp_path):
    config = KVAdminConfig(enabled=True, port=0, token_file=token_file(tmp_path))
    with AdminServer(config, [master.address], TransferConfig(), secret=SECRET) as server:
        yield server


@pytest.fixture
def http(server):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30.0) as client:
        yield client


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}",
     TOKEN, "Bearer ÿ"],
)  # fmt: skip
def test_only_the_token_opens(server, master, header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    paths = ("/v1/store/status", "/v1/store/blocks", "/metrics", "/nowhere", "/docs")
    with httpx.Client(base_url=server.url, headers=headers, timeout=30.0) as client:
        for path in paths:
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert error["kind"] == "unauthorized"
            assert error["problem"].startswith("this needs" if header is None else "not the")
        assert client.post("/v1/store/drains/first").status_code == 401
        assert client.get("/live").status_code == 200
    assert master.asked == []


def test_the_scheme_may_be_written_in_any_case():
    assert authorizes(f"bearer {TOKEN}", TOKEN)
    assert not authorizes(f"bearer{TOKEN}", TOKEN)


def test_readiness_follows_the_masters(http, master):
    assert http.get("/ready").json() == {"ready": True, "masters_away": 0, "segments": 2}
    master.segments.clear()
    answer = http.get("/ready")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)


def test_questions_and_orders(server, master):
    master.drains["first"] = [m.Draining(2, 200, 0, 0), m.Draining(0, 0, 2, 0)]
    with RemoteAdmin(server.url, token=TOKEN) as admin:
        assert [row.node for row in admin.status().segments] == ["first", "second"]
        page = admin.blocks(limit=3)
        rest = admin.blocks(after=page.next_after, limit=3)
        assert [b.key for b in (*page.blocks, *rest.blocks)] == [k.hex() for k in master.keys]
        assert rest.next_after is None
        (copy,) = page.blocks[0].copies
        assert msgspec.to_builtins(copy).keys() == {
            *("node", "address", "segment", "medium", "offset")
        }
        assert copy.where == m.NodeAddress("some-node", "127.0.0.1:1", 0, m.Medium.DRAM)
        assert admin.tenants().tenants[0].quota_bytes == 1000
        admin.set_quota("team", 5)
        assert master.asked[-1] == m.SetQuota("team", 5)
        assert admin.rebalance(100).planned == 2
        report = admin.drain("first", fewer_copies=True)
        assert (report.left_blocks, report.state, report.problem) == (2, "moving", None)
        assert master.asked[-1] == m.Drain("first", fewer_copies=True)
        assert admin.drain("first", cancel=True).moved_blocks == 2
        assert master.asked[-1] == m.Drain("first", cancel=True)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/blocks?limit=none", None, 400),
        ("GET", "/blocks?limit=0", None, 400),
        ("GET", "/blocks?after=zz", None, 400),
        ("GET", "/blocks?colour=red", None, 400),
        ("GET", "/verifications/unknown", None, 404),
        ("GET", "/verifications/unknown?wait_s=nan", None, 400),
        ("DELETE", "/verifications/unknown", None, 404),
        ("GET", "/nowhere", None, 404),
        ("PATCH", "/status", None, 405),
        ("GET", "/status?colour=red", None, 400),
        ("GET", "/tenants?colour=red", None, 400),
        ("GET", "/writers?colour=red", None, 400),
        ("GET", "/drains/first", None, 405),
        ("POST", "/blocks", None, 405),
        ("POST", "/drains/unknown", None, 404),
        ("POST", "/drains/first", b'{"fewer": true}', 400),
        ("POST", "/drains/first", b'{"fewer_copies": 1}', 400),
        ("POST", "/drains/first?wait_s=31", None, 400),
        ("POST", "/drains/first?wait_s=nan", None, 400),
        ("POST", "/drains/first?wait=1", None, 400),
        ("POST", "/rebalance", b"", 400),
        ("POST", "/rebalance", b"{", 400),
        ("POST", "/rebalance", b"[1]", 400),
        ("POST", "/rebalance", b'{"nbytes_max": "many"}', 400),
        ("POST", "/rebalance", b'{"nbytes_max": -1}', 400),
        ("POST", "/rebalance", b'{"nbytes_max": 1, "colour": 2}', 400),
        ("POST", "/rebalance", b'{"nbytes_max": 99999999999999999999999999}', 400),
        ("POST", "/rebalance", b" " * 70_000, 413),
        ("PUT", "/tenants/nobody/quota", b'{"nbytes": 1}', 404),
        ("PUT", "/tenants/team/quota", b'{"nbytes": -1}', 400),
        ("PUT", "/tenants/team/quota", b'{"nbytes": 18446744073709551616}', 400),
        ("POST", "/verifications", b'{"share": 0}', 400),
        ("POST", "/verifications", b'{"shares": 0.01}', 400),
        ("POST", "/verifications", b'{"share": 2}', 400),
    ],
)
def test_nonsense_gets_its_error(http, method, path, body, status):
    answer = http.request(method, f"/v1/store{path}", content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["problem"]


def test_what_is_not_there_is_named(http, master):
    answer = http.get("/v1/v1/store/status")
    assert answer.json()["error"]["problem"] == "there is no /v1/v1/store/status here"
    answer = http.get("/v1/store/drains/first")
    assert answer.json()["error"]["problem"] == (
        f"/v1/store/drains/first takes {answer.headers['allow']}, not GET"
    )
    assert set(answer.headers["allow"].split(", ")) <= {"POST", "DELETE"}


def test_names_may_have_slashes(server, master):
    master.drains["a/b"] = [m.Draining(1, 10, 0, 0)]
    with RemoteAdmin(server.url, token=TOKEN) as admin:
        admin.set_quota("a/b", 5)
        assert master.asked[-1] == m.SetQuota("a/b", 5)
        assert admin.drain("a/b").node == "a/b"
        admin.confirm_dead("a/b c")
        assert master.asked[-1] == m.Fence(["a/b c"], dead=True)


def test_a_drain_can_be_waited_for(http, master):
    stuck = m.Draining(3, 30, 1, 2, no_node_blocks=1, no_domain_blocks=1, in_use_blocks=1)
    master.drains["first"] = [m.Draining(4, 40, 0, 0), stuck, m.Draining(0, 0, 4, 0)]
    found = http.post("/v1/store/drains/first?wait_s=30").json()
    assert (found["state"], found["left_blocks"]) == ("stuck", 3)
    assert (found["no_node_blocks"], found["no_domain_blocks"], found["no_space_blocks"]) == (
        1,
        1,
        0,
    )
    for reason in ("another node", "another failure domain", "being read or written"):
        assert reason in found["problem"]
    assert http.post("/v1/store/drains/first").json()["state"] == "empty"


def test_who_waits_keeps_nobody_from_asking(server, http, master, monkeypatch):
    """More wait than a program has threads for requests, and none is waited for at the end."""
    let_go = threading.Event()
    monkeypatch.setattr(Verifier, "run", lambda self: let_go.wait(60.0))
    master.drains["first"] = [m.Draining(4, 40, 0, 0)]
    job = http.post("/v1/store/verifications").json()["id"]
    waits = [("POST", "drains/first"), ("GET", f"verifications/{job}")] * 20
    callers = []
    for method, path in waits:
        caller = socket.create_connection(("127.0.0.1", port_of(server)))
        caller.sendall(
            f"{method} /v1/store/{path}?wait_s=30 HTTP/1.1\r\nHost: here\r\n"
            f"Authorization: Bearer {TOKEN}\r\nContent-Length: 0\r\n\r\n".encode()
        )
        callers.append(caller)
    drains = m.Drain("first")
    eventually(lambda: master.asked.count(drains) >= len(waits) // 2, "all drains were asked for")
    assert http.get("/ready").status_code == 200
    assert http.get(f"/v1/store/verifications/{job}").json()["state"] == "running"
    assert not select.select(callers, [], [], 0)[0], "they wait"
    let_go.set()
    server.close()
    for caller in callers:
        caller.close()


def port_of(server: AdminServer) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.parametrize("said", [b"", b"GET /live HTTP/1.1\r\nHost"])
def test_who_says_nothing_is_hung_up_on(server, http, monkeypatch, said):
    monkeypatch.setattr(patient_protocol, "SILENCE_S", 0.5)
    callers = [socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(20)]
    for caller in callers:
        caller.sendall(said)
        caller.settimeout(60.0)
    for caller in callers:
        with caller:
            assert caller.recv(100) == b""
    assert http.get("/live").status_code == 200


def test_a_connection_on_which_something_is_asked_stays():
    """A request that is answered for long, and requests that come one after the other."""
    looks, closed = [], []
    connection = patient_protocol.PatientProtocol.__new__(patient_protocol.PatientProtocol)
    connection.loop = SimpleNamespace(call_later=lambda seconds, look: looks.append(look))
    connection.transport = SimpleNamespace(close=lambda: closed.append(True))
    connection.cycle = None
    connection._look_later()
    for is_answered in (False, False, True):  # asked anew each time
        connection.cycle = SimpleNamespace(response_complete=is_answered)
        looks.pop()()
    connection.cycle = SimpleNamespace(response_complete=False)
    looks.pop()()
    looks.pop()()  # still the same, and not answered yet
    assert not closed
    connection.cycle.response_complete = True
    looks.pop()()
    assert closed
    assert not looks


def test_a_body_that_does_not_come_to_its_end_is_no_failure_of_ours(server, caplog):
    with socket.create_connection(("127.0.0.1", port_of(server))) as caller:
        caller.sendall(
            b"POST /v1/store/rebalance HTTP/1.1\r\nHost: here\r\n"
            b"Authorization: Bearer " + TOKEN.encode() + b"\r\nContent-Length: 100\r\n\r\n{"
        )
        time.sleep(0.2)
    server.close()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_who_announces_a_body_and_sends_none_is_hung_up_on(server, http, monkeypatch):
    monkeypatch.setattr(http_app, "BODY_S", 0.5)
    monkeypatch.setattr(patient_protocol, "SILENCE_S", 0.5)
    with socket.create_connection(("127.0.0.1", port_of(server))) as caller:
        caller.settimeout(60.0)
        caller.sendall(
            b"POST /v1/store/rebalance HTTP/1.1\r\nHost: here\r\n"
            b"Authorization: Bearer " + TOKEN.encode() + b"\r\nContent-Length: 100\r\n\r\n{"
        )
        said = b""
        while part := caller.recv(1000):
            said += part
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come within 0.5 s" in said
    assert http.get("/live").status_code == 200


def test_a_node_that_leaves_while_it_is_waited_for_is_named(http, master):
    master.drains["first"] = [m.Draining(4, 40, 0, 0), m.Draining(3, 30, 1, 0)]
    answer = master.answer

    def leave(request):
        reply = answer(request)
        if isinstance(request, m.Drain) and len(master.drains.get("first", [])) == 1:
            del master.drains["first"]
        return reply

    master.answer = leave
    found = http.post("/v1/store/drains/first?wait_s=30")
    assert (found.status_code, found.json()["error"]["kind"]) == (404, "node_left")
    assert "4 blocks are left on first: the node left the pool" in found.json()["error"]["problem"]


def test_a_body_may_be_missing_where_all_has_a_default(http):
    answer = http.post("/v1/store/rebalance")
    assert "nbytes_max" in answer.json()["error"]["problem"]
    assert http.post("/v1/store/verifications").status_code == 202


def test_a_master_that_is_away_is_503(http, server, master):
    server.admin._links[0]._timeout_s = 0.2
    master.__exit__()
    answer = http.get("/v1/store/blocks")
    assert answer.status_code == 503
    assert answer.json()["error"]["kind"] == "master_unavailable"
    assert http.get("/v1/store/status").json()["masters"][0]["problem"]
    assert 'moe_kvstore_master_up{master="' in http.get("/metrics").text


def test_metrics_have_the_documented_names(http, server, master):
    server.registry.register(CountsCollector(NODE_EVENTS, lambda: {"copied_blocks": 4}))
    text = http.get("/metrics").text
    told = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    for name in told:
        assert name.removesuffix("_total") in {spec.name for spec in METRICS}
    where = f'master="{master.address}"'
    assert f'moe_kvstore_lookups_total{{{where},outcome="hit"}} 3.0' in text
    assert f'moe_kvstore_bytes{{{where},state="free"}} 77.0' in text
    assert f'moe_kvstore_put_refusals_total{{{where},reason="no_space"}} 9.0' in text
    assert f"moe_kvstore_master_up{{{where}}} 1.0" in text
    assert 'moe_kvstore_tenant_quota_bytes{tenant="team"} 1000.0' in text
    assert 'moe_kvstore_segment_blocks{medium="dram",node="second",segment="1"} 3.0' in text
    assert 'moe_kvstore_node_events_total{event="copied"} 4.0' in text


def test_the_document_has_all_metrics():
    text = DOCUMENT.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(moe_kvstore_\w+)` ", text, re.MULTILINE))
    assert {name.removesuffix("_total") for name in documented} == {spec.name for spec in METRICS}


def test_open_metrics_need_no_token(master, tmp_path):
    config = KVAdminConfig(enabled=True, port=0, token_file=token_file(tmp_path), open_metrics=True)
    with AdminServer(config, [master.address], TransferConfig(), secret=SECRET) as server:
        assert httpx.get(f"{server.url}/metrics", timeout=30.0).status_code == 200
        assert httpx.get(f"{server.url}/v1/store/status", timeout=30.0).status_code == 401


def test_a_verification_of_unreachable_nodes_says_so(server, master):
    master.segments.clear()
    master.statistics = figures(blocks=5, copies=7)
    with RemoteAdmin(server.url, token=TOKEN) as admin:
        job_id = admin.verify(VerifyOptions())
        deadline = time.monotonic() + 60.0
        while (report := admin.verification(job_id)).state is VerifyState.RUNNING:
            assert time.monotonic() < deadline
        assert report.state is VerifyState.DONE
        assert (report.bad_copies, report.checked_copies, report.expected_copies) == (5, 0, 7)
        assert {bad.key for bad in report.bad} == {key.hex() for key in master.keys}


def test_the_client_tells_refusal_from_silence(server):
    with RemoteAdmin(server.url, token="x" * 16) as admin, pytest.raises(AdminRefused) as caught:
        admin.status()
    assert caught.value.status == 401
    away = RemoteAdmin("http://127.0.0.1:1", token=TOKEN)
    with away, pytest.raises(AdminUnavailable):
        away.status()


@pytest.mark.parametrize(
    ("text", "mode"),
    [("short", 0o600), ("", 0o600), (TOKEN, 0o644), ("with some spaces in it", 0o600),
     ("x" * 5000, 0o600)],
)  # fmt: skip
def test_unusable_tokens_are_refused(tmp_path, text, mode):
    with pytest.raises(AdminTokenInvalid) as caught:
        read_token(token_file(tmp_path, text, mode))
    assert "token" in caught.value.path
    assert text not in str(caught.value) or not text
    assert isinstance(caught.value, KVStoreError)


@pytest.mark.parametrize(
    "options",
    [{"enabled": True}, {"enabled": True, "host": "0.0.0.0", "token_file": True},
     {"certificate": "/nonexistent"}],
)  # fmt: skip
def test_the_configuration_keeps_the_token_secret(tmp_path, options):
    if options.get("token_file"):
        options = {**options, "token_file": token_file(tmp_path)}
    with pytest.raises(ValidationError):
        KVAdminConfig(**options)


def test_an_unchecked_configuration_does_not_listen_either(tmp_path):
    config = KVAdminConfig(enabled=True, token_file=token_file(tmp_path))
    bare = config.model_copy(update={"host": "0.0.0.0"})
    server = AdminServer(bare, ["127.0.0.1:1"], TransferConfig(), secret=SECRET)
    with pytest.raises(ValueError, match="loopback"):
        server.open()
    server.close()


def test_what_is_wrong_with_the_way_to_the_service_is_named(tmp_path):
    no_certificate = token_file(tmp_path)
    with pytest.raises(AdminUnavailable, match=re.escape(f"{no_certificate} holds no cert")):
        RemoteAdmin("https://127.0.0.1:1", token=TOKEN, authority=no_certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # hangs up, as a TLS service does

        def hang_up() -> None:
            with listener.accept()[0] as caller:
                caller.recv(1 << 16)

        hanging_up = threading.Thread(target=hang_up)
        hanging_up.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        admin = RemoteAdmin(url, token=TOKEN)
        with admin, pytest.raises(AdminUnavailable, match="https: service"):
            admin.status()
        hanging_up.join()
