"""Whether the files of a TLS identity are what they should be; one clear message each."""

from __future__ import annotations

import ssl
from pathlib import Path


def refuse_password() -> str:
    """Stand in for the prompt that would wait for a person."""
    raise ValueError(
        "an encrypted private key cannot be used: nobody is there to type its password"
    )


def check_readable(path: Path) -> Path:
    """Return a path whose file can be read.

    Raises:
        ValueError: it cannot, and why.
    """
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    return path


def check_certificates(path: Path) -> Path:
    """Return a path whose file holds at least one certificate in PEM.

    Raises:
        ValueError: it does not.
    """
    check_readable(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError("holds no certificate in PEM") from error
    return path


def check_pair(certificate: Path, private_key: Path) -> None:
    """See that a private key belongs to a certificate.

    Raises:
        ValueError: it does not, or is none, or is encrypted.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError("private_key does not belong to certificate") from error
        raise ValueError("private_key holds no private key in PEM") from error
