"""Certificates: what a process is told about its own, and what it accepts from others."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from pydantic import ValidationError

from configs.errors import ConfigError
from configs.loader import load_config
from configs.schema import TransferConfig, TransferTls
from tests.support.certificates import Authority
from tests.support.engines import (
    new_engine,
)
from tests.support.waits import eventually
from transfer import HandshakeRefused
from transfer.connections.tls import Credentials

SOON_S = 60.0
NOW = datetime.now(UTC)
YESTERDAY, LONG_AGO = NOW - timedelta(days=1), NOW - timedelta(days=30)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    folder = tmp_path / "another"
    folder.mkdir()
    return Authority(folder)


def files(tls: TransferTls) -> dict[str, Path]:
    return {key: path for key, path in tls if path is not None}


def test_without_files_it_is_off() -> None:
    assert not TransferTls().enabled
    assert Credentials.load(TransferTls()) is None


@pytest.mark.parametrize("missing", ["certificate", "private_key", "authority"])
def test_all_three_or_none(authority: Authority, missing: str) -> None:
    given = files(authority.member())
    del given[missing]
    with pytest.raises(ValidationError, match="all of them, or none"):
        TransferTls(**given)


@pytest.mark.parametrize("absent", ["certificate", "private_key", "authority"])
def test_a_file_that_is_not_there(authority: Authority, absent: str) -> None:
    given = files(authority.member()) | {absent: authority.folder / "nowhere.pem"}
    with pytest.raises(ValidationError, match="cannot be read: No such file"):
        TransferTls(**given)


def test_files_that_are_something_else(authority: Authority, stranger: Authority) -> None:
    good, other = files(authority.member()), files(stranger.member())
    nonsense = authority.folder / "nonsense.pem"
    nonsense.write_text("-----BEGIN LOVE LETTER-----\n")
    for wrong, message in (
        ({"certificate": nonsense}, "holds no certificate in PEM"),
        ({"authority": nonsense}, "holds no certificate in PEM"),
        ({"private_key": nonsense}, "holds no private key in PEM"),
        ({"private_key": other["private_key"]}, "private_key does not belong to certificate"),
    ):
        with pytest.raises(ValidationError, match=message):
            TransferTls(**(good | wrong))


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(authority: Authority) -> None:
    given = files(authority.member())
    key = serialization.load_pem_private_key(given["private_key"].read_bytes(), password=None)
    locked = authority.folder / "locked.key"
    locked.write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"sesame"),
    ))  # fmt: skip
    with pytest.raises(ValidationError, match="encrypted private key cannot be used"):
        TransferTls(**(given | {"private_key": locked}))


def test_a_configuration_file_is_told_the_setting_and_the_line(
    authority: Authority, tmp_path: Path
) -> None:
    given = files(authority.member())
    text = "".join(f"    {key}: {path}\n" for key, path in given.items())
    file = tmp_path / "own.yaml"
    file.write_text(f"model:\n  path: {tmp_path}\ntransfer:\n  tls:\n{text}")
    assert load_config(file, environ={}).transfer.tls == TransferTls(**given)
    given["certificate"].unlink()
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    (problem,) = caught.value.problems
    assert problem.name == "transfer.tls.certificate"
    assert problem.origin.endswith("own.yaml:5") or "5" in problem.origin
    assert "cannot be read" in problem.expected


@pytest.mark.parametrize("options", [{"backend": "verbs"}, {"devices": ("mlx5_0",)}])
def test_rdma_cannot_be_asked_for_with_tls(authority: Authority, options: dict) -> None:
    with pytest.raises(ValidationError, match="tls cannot encrypt what RDMA devices move"):
        TransferConfig(tls=authority.member(), **options)


def test_a_certificate_that_every_peer_would_refuse(
    authority: Authority, stranger: Authority
) -> None:
    expired = authority.member("old", not_before=LONG_AGO, not_after=YESTERDAY)
    foreign = TransferTls(**(files(stranger.member()) | {"authority": authority.file}))
    for tls, why in ((expired, "certificate has expired"), (foreign, "certificate refused")):
        with pytest.raises(OSError, match=f"every peer would refuse it.*{why}"):
            new_engine("tcp", tls=tls).open()


def client(authority: Authority, own: TransferTls | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    context.check_hostname = False
    if own is not None:
        assert own.certificate is not None
        context.load_cert_chain(own.certificate, own.private_key)
    return context


def bad_members(authority: Authority, stranger: Authority) -> list[tuple[str, TransferTls | None]]:
    return [
        ("certificate required", None),
        ("unknown ca", stranger.member()),
        ("certificate expired", authority.member("o", not_before=LONG_AGO, not_after=YESTERDAY)),
    ]


def test_callers_without_a_good_certificate_are_refused(
    authority: Authority, stranger: Authority
) -> None:
    with new_engine("tcp", tls=authority.member()) as engine:
        host, port = engine.address.split(":")
        cases = bad_members(authority, stranger)
        for why, own in cases:
            context = client(authority, own)
            with (
                socket.create_connection((host, int(port)), timeout=SOON_S) as raw,
                context.wrap_socket(raw) as sock,
                pytest.raises(ssl.SSLError, match=f"(?i){why.replace(' ', '.')}"),
            ):
                sock.recv(100)
        eventually(lambda: engine.statistics().refused_handshakes >= len(cases), "counted")
        assert engine.peers() == ()


@contextlib.contextmanager
def impostor(authority: Authority, own: TransferTls) -> Iterator[str]:
    """Somebody who accepts with a certificate of its own; yields the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert own.certificate is not None
    context.load_cert_chain(own.certificate, own.private_key)
    context.load_verify_locations(authority.file)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock, context.wrap_socket(sock, server_side=True) as secured:
                    secured.recv(100)

        thread = threading.Thread(target=accept)
        thread.start()
        yield "{}:{}".format(*listener.getsockname())
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_an_owner_without_a_good_certificate_is_refused(
    authority: Authority, stranger: Authority
) -> None:
    with new_engine("tcp", tls=authority.member()) as engine:
        for why, own in (
            ("certificate refused: .*issuer", stranger.member()),
            ("expired", authority.member("o", not_before=LONG_AGO, not_after=YESTERDAY)),
        ):
            with (
                impostor(authority, own) as address,
                pytest.raises(HandshakeRefused, match=why),
            ):
                engine.connect(address, timeout_s=SOON_S)


@pytest.mark.parametrize("encrypted_calls", [True, False])
def test_an_engine_with_tls_and_one_without_do_not_meet(
    authority: Authority, encrypted_calls: bool
) -> None:
    with new_engine("tcp", tls=authority.member()) as one, new_engine("tcp") as two:
        caller, called = (one, two) if encrypted_calls else (two, one)
        why = "before it spoke TLS" if encrypted_calls else "speaks TLS only"
        with pytest.raises(HandshakeRefused, match=why):
            caller.connect(called.address, timeout_s=SOON_S)
        eventually(lambda: called.statistics().refused_handshakes >= 1, "counted")


def test_members_of_two_clusters_with_one_authority_do_not_meet(authority: Authority) -> None:
    tls = authority.member()
    with (
        new_engine("tcp", tls=tls) as one,
        new_engine("tcp", tls=tls, secret=b"other") as two,
        pytest.raises(HandshakeRefused, match="secret"),
    ):
        one.connect(two.address, timeout_s=SOON_S)
