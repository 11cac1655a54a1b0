"""Who this process is for TLS: its certificate, and the authority that signed those of all members.

Both ends of a connection show a certificate (TLS 1.3). Host names are not compared: members find
each other by address, and who they are is proved by the engine's own handshake inside
(`transfer.connections.handshake`), which is bound to the TLS connection that carries it.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Final

from configs.certificates import refuse_password
from configs.schema import TransferTls

# Of our own handshake with ourselves: each side speaks twice, and hears the other in between.
STEPS_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What TLS connections of one engine are made with.

    Attributes:
        client: for connections that it makes.
        server: for connections that it accepts.
        certificate: its own, DER.
    """

    client: ssl.SSLContext
    server: ssl.SSLContext
    certificate: bytes

    @classmethod
    def load(cls, config: TransferTls) -> Credentials | None:
        """Read the files; None if TLS is off.

        Raises:
            OSError: a file is not there or not what it should be, or the authority's other
                members would refuse this certificate: expired, of another authority, not made
                for both ends of a connection. Also `ssl.SSLError`, which is one.
        """
        if config.certificate is None or config.private_key is None or config.authority is None:
            return None
        found = cls(
            client=_context(ssl.PROTOCOL_TLS_CLIENT, config),
            server=_context(ssl.PROTOCOL_TLS_SERVER, config),
            certificate=_first_certificate(config.certificate.read_text()),
        )
        try:
            found.meet_itself()
        except ssl.SSLError as error:
            reason = f"{config.certificate}: every peer would refuse it: {explain(error)}"
            raise ssl.SSLError(error.errno or 0, reason) from error
        return found

    def meet_itself(self) -> None:
        """Shake hands with ourselves: what fails here fails with every peer.

        Raises:
            ssl.SSLError: why a peer would refuse.
        """
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [
            self.client.wrap_bio(down, up),
            self.server.wrap_bio(up, down, server_side=True),
        ]
        for step in range(STEPS_MAX):
            try:
                sides[step % 2].do_handshake()
            except ssl.SSLWantReadError:
                continue


def explain(error: ssl.SSLError) -> str:
    """Say in one line what TLS has against a connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    reason = (error.reason or error.strerror or str(error)).lower().replace("_", " ")
    if " alert " in reason:
        return f"the other side refuses ours: {reason}"
    return reason


def _context(side: ssl._SSLMethod, config: TransferTls) -> ssl.SSLContext:
    assert config.certificate is not None
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if side == ssl.PROTOCOL_TLS_SERVER:
        # Nothing is resumed: each connection proves everything anew.
        context.num_tickets = 0
    context.load_verify_locations(config.authority)
    context.load_cert_chain(config.certificate, config.private_key, password=refuse_password)
    return context


def _first_certificate(pem: str) -> bytes:
    start, end = pem.index(ssl.PEM_HEADER), pem.index(ssl.PEM_FOOTER)
    return ssl.PEM_cert_to_DER_cert(pem[start : end + len(ssl.PEM_FOOTER)])
