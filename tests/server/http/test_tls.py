"""TLS from end to end: a client that checks the certificate, clients that do not speak TLS, files that do not fit."""

import shutil
import socket
import ssl
import subprocess

import httpx
import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """A folder with two certificates for 127.0.0.1 and their keys, and the first key encrypted."""
    folder = tmp_path_factory.mktemp("pem")
    for name in ("one", "two"):
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=jaxis"
        command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {name}.key -out {name}.pem"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    command = "openssl ec -aes256 -passout pass:secret -in one.key -out encrypted.key"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    (folder / "garbage.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (folder / "text").write_text("hello\n")
    return folder


@pytest.fixture
def tls_server(serve, pem):
    server = serve(ssl_certfile=str(pem / "one.pem"), ssl_keyfile=str(pem / "one.key"))
    server.url = server.url.replace("http:", "https:")
    return server


def verifying(path):
    return ssl.create_default_context(cafile=path)


def test_a_client_that_checks_the_certificate_is_served(tls_server, pem):
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
    with httpx.Client(base_url=tls_server.url, verify=verifying(pem / "one.pem"), timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok"}
        text = http.post("/v1/chat/completions", json=body).text
        assert "Paris" in text
        assert text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{tls_server.url}/health", verify=verifying(pem / "two.pem"))


def test_who_speaks_no_tls_or_an_old_one_gets_nothing(tls_server, pem):
    address = ("127.0.0.1", int(tls_server.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 2" not in connection.recv(1000)
    context = verifying(pem / "one.pem")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(address, timeout=30) as connection, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(connection, server_hostname="127.0.0.1")
    assert httpx.get(f"{tls_server.url}/health", verify=verifying(pem / "one.pem")).status_code == 200


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("certfile", "keyfile", "messages"),
    [
        ("nowhere.pem", "one.key", ["--ssl-certfile", "nowhere.pem", "No such file"]),
        ("text", "one.key", ["--ssl-certfile", "no certificate"]),
        ("one.key", "one.pem", ["--ssl-certfile", "no certificate"]),
        ("one.pem", "text", ["--ssl-keyfile", "no private key"]),
        ("garbage.pem", "one.key", ["--ssl-certfile", "garbage.pem", "cannot be used"]),
        ("one.pem", "two.key", ["two.key is not the key of the certificate"]),
        ("one.pem", "encrypted.key", ["encrypted"]),
    ],
)
def test_files_that_do_not_fit_are_one_line_before_the_model_loads(pem, certfile, keyfile, messages, monkeypatch):
    monkeypatch.setattr("jaxis.engine.setup.build_engine", lambda *_: pytest.fail("loaded"))
    monkeypatch.chdir(pem)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--ssl-certfile", certfile, "--ssl-keyfile", keyfile])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("jaxis: error: ")
    assert all(message in line for message in messages), line
