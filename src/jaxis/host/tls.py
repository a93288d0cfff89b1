"""TLS certificates and keys in files, with a clear error for those that cannot be used."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from jaxis.errors import ConfigError


def load_certificate(context: ssl.SSLContext, certfile: Path, keyfile: Path, names: tuple[str, str]) -> None:
    """Loads a certificate, with those that it needs, and its key from PEM files into a server's or client's context.

    Raises ConfigError, with the `names` of the options, if a file cannot be read or is none of this kind, or the key is
    encrypted, or another certificate's.
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
    """Makes a TLS 1.3 context for processes whose certificates are all signed by one CA.

    Names in certificates are not compared with addresses: the CA must sign those of this group alone. `ca_certs` check
    the other side. Raises ConfigError, with the `name` of the option that holds all files, as `load_certificate` does.
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
    """Raises ConfigError if an option's file cannot be read, or holds nothing of this kind, such as "CERTIFICATE"."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from None
    if not re.search(rb"-----BEGIN [A-Z ]*%s-----" % kind.encode(), content):
        raise ConfigError(f"{name} {path} holds no {kind.lower()} in PEM format")
