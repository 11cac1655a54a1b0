"""Masters elected in a real etcd that answers only who shows a certificate, and a password."""

import json
import secrets
import ssl
import time
import urllib.request

import pytest

from configs.kvstore_masters import EtcdConfig
from configs.schema import KVStoreConfig
from kvstore import MasterServer
from kvstore.client.master_map import MasterMap
from kvstore.discovery.candidacy import Candidacy
from kvstore.discovery.etcd import EtcdGateway
from kvstore.discovery.etcd_records import EtcdMasters
from kvstore.errors import EtcdUnavailable
from kvstore.wire import messages as m
from tests.support.certificates import Authority
from tests.support.etcd_server import running_etcd

SECRET = secrets.token_bytes(16)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def etcd(authority, tmp_path_factory):
    tls = authority.member("server", hosts=("127.0.0.1",))
    with running_etcd(tmp_path_factory.mktemp("etcd"), tls=tls) as server:
        yield server


@pytest.fixture(scope="module")
def client(authority):
    return authority.member("client")


@pytest.fixture
def config(etcd, client):
    return EtcdConfig(
        endpoints=(etcd.endpoint,),
        prefix=f"/{secrets.token_hex(8)}",
        lease_s=30,
        timeout_s=10.0,
        ca_file=client.authority,
        cert_file=client.certificate,
        key_file=client.private_key,
    )


def lead_and_take_over(config):
    """An election, its outcome as clients find it, and a second one."""
    store = KVStoreConfig(request_timeout_s=WAIT_S)

    def candidate():
        server = MasterServer(store, secret=SECRET, standby=True)
        server.open()
        candidacy = Candidacy(config, 0, 1, server)
        candidacy.open()
        return server, candidacy

    first, leading = candidate()
    with EtcdMasters(config, 1) as directory:
        try:
            assert leading.wait(WAIT_S)
            second, waiting = candidate()
            try:
                masters = MasterMap(directory, store, secret=SECRET, identity="me")
                until(lambda: directory.masters()[0].address == first.address, "first")
                assert masters.ask(m.Exists([b"k" * 16]), m.Present).flags == [False]
                leading.close()
                assert waiting.wait(WAIT_S)
                until(lambda: directory.masters()[0].address == second.address, "second")
                assert masters.ask(m.Exists([b"k" * 16]), m.Present).flags == [False]
                masters.close()
            finally:
                waiting.close()
                second.close()
        finally:
            leading.close()
            first.close()


def until(true, what):
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def refused(config) -> str:
    gateway = EtcdGateway(config)
    with pytest.raises(EtcdUnavailable) as caught:
        gateway.range("/")
    gateway.close()
    return str(caught.value)


def test_election_and_discovery_over_tls(config):
    lead_and_take_over(config)


def test_another_authority_is_one_clear_error(config, tmp_path, caplog):
    """The server's certificate is not believed: nothing is sent."""
    other = Authority(tmp_path).member("other")
    wrong = config.model_copy(update={"ca_file": other.authority})
    assert "certificate verify failed" in refused(wrong)
    with EtcdMasters(wrong, 1) as directory:  # it goes on trying, and says so
        until(lambda: "certificate verify failed" in caplog.text, "a warning")
        assert directory.masters()[0].address == ""


def test_nobody_is_answered_without_a_certificate_of_the_authority(config, tmp_path):
    assert refused(config.model_copy(update={"cert_file": None, "key_file": None}))
    other = Authority(tmp_path).member("other")
    update = {"cert_file": other.certificate, "key_file": other.private_key}
    assert refused(config.model_copy(update=update))


def test_a_user_and_a_password(etcd, config, client, tmp_path):
    password = secrets.token_hex(16)
    context = ssl.create_default_context(cafile=client.authority)
    context.load_cert_chain(client.certificate, client.private_key)

    def administer(path, body, token=None):
        request = urllib.request.Request(
            f"{etcd.endpoint}/v3/auth/{path}",
            data=json.dumps(body).encode(),
            headers={} if token is None else {"Authorization": token},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as reply:
            return json.load(reply)

    administer("user/add", {"name": "root", "password": password})
    administer("role/add", {"name": "root"})
    administer("user/grant", {"user": "root", "role": "root"})
    administer("enable", {})
    try:
        assert refused(config)  # nobody in particular
        right, wrong = tmp_path / "right", tmp_path / "wrong"
        right.write_text(f"{password}\n")
        wrong.write_text("another")
        as_root = config.model_copy(update={"user": "root", "password_file": right})
        lead_and_take_over(as_root)
        problem = refused(as_root.model_copy(update={"password_file": wrong}))
        assert password not in problem
        assert "authentication failed" in problem
    finally:
        token = administer("authenticate", {"name": "root", "password": password})["token"]
        administer("disable", {}, token)
