"""Certificates of a CA and of another one, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_NEW_KEY = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"


def make_certificates(folder: Path) -> Path:
    """The folder with ca.pem, and one.pem and two.pem that it has signed; other_ca.pem, and other.pem of that; keys."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    commands = [f"{_NEW_KEY} -subj /CN={ca} -keyout {ca}.key -out {ca}.pem" for ca in ("ca", "other_ca")]
    commands += [
        f"{_NEW_KEY} -subj /CN={name} -CA {ca}.pem -CAkey {ca}.key -keyout {name}.key -out {name}.pem"
        for name, ca in (("one", "ca"), ("two", "ca"), ("other", "other_ca"))
    ]
    for command in commands:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def tls_files(folder: Path, name: str, ca: str = "ca") -> dict[str, str]:
    """`kv_connector_extra_config` of an engine with this certificate."""
    return {
        "ssl_certfile": str(folder / f"{name}.pem"),
        "ssl_keyfile": str(folder / f"{name}.key"),
        "ssl_ca_certs": str(folder / f"{ca}.pem"),
    }
