"""TLS certificates and keys in files, with a clear error for those that cannot be used."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from jaxis.errors import ConfigError


def load_certificate(context: ssl.SSLContext, certfile: Path, keyfile: Path, names: tuple[str, str]) -> None:
    """Has a context show a certificate.

    Args:
      context: Of a server or a client.
      certfile: The certificate, PEM, and those that it needs.
      keyfile: Its key, PEM.
      names: Of the two options, for errors.

    Raises:
      ConfigError: A file cannot be read or is none of this kind, or the key is encrypted, or another certificate's.
    """
    cert_name, key_name = names
    check_pem(cert_name, certfile, "CERTIFICATE")
    check_pem(key_name, keyfile, "PRIVATE KEY")

    def refuse_encrypted_key() -> str:
        raise ConfigError(f"the key of {key_name} is encrypted: give one without a passphrase, readable only for you")

    try:
        context.load_cert_chain(certfile, keyfile, password=refuse_encrypted_key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key_name} {keyfile} is not the key of the certificate in {certfile}") from None
        raise ConfigError(
            f"{cert_name} {certfile} and {key_name} {keyfile} cannot be used: {error.reason or error}"
        ) from None


def mutual_context(*, is_server: bool, certfile: Path, keyfile: Path, ca_certs: Path, name: str) -> ssl.SSLContext:
    """TLS 1.3 between processes that trust each other because one CA has signed the certificates of all of them.

    Names in certificates are not compared with addresses: the CA is to sign those of this group alone.

    Args:
      is_server: Whether this side accepts connections.
      certfile: This side's certificate.
      keyfile: Its key.
      ca_certs: The certificates, PEM, of the CAs that the other side's is checked with.
      name: Of the option that holds all three, for errors.

    Raises:
      ConfigError: See `load_certificate`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if is_server:
        context.num_tickets = 0  # no connection is resumed
    load_certificate(context, certfile, keyfile, (f"{name}: ssl_certfile", f"{name}: ssl_keyfile"))
    check_pem(f"{name}: ssl_ca_certs", ca_certs, "CERTIFICATE")
    try:
        context.load_verify_locations(ca_certs)
    except ssl.SSLError as error:
        raise ConfigError(f"{name}: ssl_ca_certs {ca_certs} cannot be used: {error.reason or error}") from None
    return context


def check_pem(name: str, path: Path, kind: str) -> None:
    """Checks that an option's file holds something of this kind, such as "CERTIFICATE".

    Raises:
      ConfigError: It cannot be read, or does not.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from None
    if not re.search(rb"-----BEGIN [A-Z ]*%s-----" % kind.encode(), content):
        raise ConfigError(f"{name} {path} holds no {kind.lower()} in PEM format")
