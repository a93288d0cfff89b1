"""Images that requests name: only what is allowed is read, and from the internet nothing that is not of it."""

import http.server
import io
import os
import socket
import ssl
import threading
import time

import pytest

from jaxis.errors import ConfigError, RequestError
from jaxis.vision import access
from jaxis.vision.access import ImageAccess, is_public
from jaxis.vision.decode import open_image
from tests.support.certificates import make_certificates
from tests.support.vision_checkpoints import random_image


def png():
    data = io.BytesIO()
    random_image(12, 9).save(data, "PNG")
    return data.getvalue()


class _Host(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Host"]))
        kind, data, status = "image/png", png(), 200
        if self.path == "/redirect":
            status = 302
        if self.path == "/text":
            kind = "text/html"
        if self.path == "/slow":
            time.sleep(1.0)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Location", "https://one/a.png")
        self.send_header("Content-Length", str(2**30 if self.path == "/huge" else len(data)))
        self.end_headers()
        if self.path == "/trickle":
            for byte in data:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host called "one" on this machine, whose address counts as public."""
    folder = make_certificates(tmp_path)
    server = _Server(("127.0.0.1", 0), _Host)
    server.asked = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "one.pem", folder / "one.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    client = ssl.create_default_context(cafile=folder / "ca.pem")
    client.hostname_checks_common_name = True
    monkeypatch.setattr(access, "_tls", lambda: client)
    monkeypatch.setattr(access, "_PORT", server.server_address[1])
    monkeypatch.setattr(access, "is_public", lambda address: address == "127.0.0.1")
    resolve(monkeypatch, "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def resolve(monkeypatch, *addresses):
    def resolved(_host, port, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def read(url, **allowed):
    return open_image(ImageAccess(**allowed).source(url, "url"), "the image").size


def test_what_is_allowed_is_fetched_from_the_very_host(host):
    assert read("https://one/a.png?x=1#y", domains=("one",)) == (12, 9)
    assert read("https://ONE:443", domains=("one",)) == (12, 9)
    assert host.asked == [("/a.png?x=1", "one"), ("/", "one")]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("redirect", "status 302, and redirects are not followed"),
        ("text", "not declared as an image"),
        ("huge", "more than 16.0 MiB"),
        ("slow", "not fetched within 0.5 seconds"),
        ("trickle", "not fetched within 0.5 seconds"),
    ],
)
def test_other_answers_are_refused_in_one_line(host, monkeypatch, path, words):
    monkeypatch.setattr(access, "FETCH_SECONDS", 0.5)
    with pytest.raises(RequestError) as error:
        read(f"https://one/{path}", domains=("one",))
    assert words in str(error.value)
    assert "127.0.0.1" not in str(error.value)
    assert host.asked == [(f"/{path}", "one")]


def test_a_host_with_another_certificate_is_not_asked(host):
    with pytest.raises(RequestError, match="does not answer as it should"):
        read("https://two/a.png", domains=("two",))
    assert host.asked == []


@pytest.mark.parametrize(
    "addresses",
    [
        ("127.0.0.1",),
        ("8.8.8.8", "10.0.0.1"),
        ("169.254.169.254",),
        ("::1",),
        ("::ffff:10.0.0.1",),
        ("64:ff9b::7f00:1",),
    ],
)
def test_names_of_private_addresses_are_refused(monkeypatch, addresses):
    def connects(*_):
        raise AssertionError("connected")

    resolve(monkeypatch, *addresses)
    monkeypatch.setattr(socket, "create_connection", connects)
    with pytest.raises(RequestError, match="the host's address is not a public one"):
        read("https://one/a.png", domains=("one",))


def test_which_addresses_are_public():
    public = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
    others = ["0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1"]
    others += [
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "fe80::1%eth0",
        "fc00::1",
        "ff02::1",
    ]
    others += [
        "fe80::1%eth0",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "2001:0:1::",
    ]
    assert [address for address in [*public, *others] if is_public(address)] == public


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://one/a.png",
            "https://two/a.png",
            "https://one.two/a.png",
            "https://two@one/a.png",
            "https://one@two/",
        ),
        *("https://one:8443/a.png", "https://one\\@two/a.png", "https://two\\one/", "https:///a.png", "//one/a.png"),
        *(
            "https://127.0.0.1/",
            "https://0x7f.1/",
            "https://one./a.png",
            "https://one /a.png",
            "https://one/\n",
            "ftp://one/",
        ),
        *(
            "https://[::1/",
            "https://one:x/",
            "https://öne/",
            "file:///etc/hostname",
            "/etc/hostname",
            "",
            "https://one/" + "a" * 3000,
        ),
    ],
)
def test_other_addresses_are_refused_before_anything_is_asked(monkeypatch, url):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("resolved"))
    with pytest.raises(RequestError, match=r"^url (must be a data: URL|is at the host)[^\n]*$"):
        ImageAccess(domains=("one",)).source(url, "url")


def test_only_files_below_the_folder_are_read(tmp_path):
    folder, outside = tmp_path / "in", tmp_path / "outside.png"
    folder.mkdir()
    for path in (folder / "a b.png", outside):
        path.write_bytes(png())
    (folder / "link.png").symlink_to(folder / "a b.png")
    (folder / "escape.png").symlink_to(outside)
    os.mkfifo(folder / "pipe.png")
    for name in ("a%20b.png", "link.png"):
        assert read(f"file://{folder}/{name}", local_path=folder) == (12, 9)
    for name in ("escape.png", "../outside.png", "%2e%2e/outside.png", "missing.png", "pipe.png", "", "a%00.png"):
        with pytest.raises(RequestError, match="is no file below the folder that is allowed"):
            read(f"file://{folder}/{name}", local_path=folder)
    for url in (f"file://host{folder}/link.png", str(folder / "link.png"), "https://one/a.png"):
        with pytest.raises(RequestError, match="must be a data: URL with the image itself or a file:// URL"):
            read(url, local_path=folder)


@pytest.mark.parametrize("domain", ["https://one", "one/path", "one:443", "*.one", "", " one"])
def test_what_is_no_host_cannot_be_allowed(domain):
    with pytest.raises(ConfigError, match="is no host that images can be fetched from"):
        ImageAccess(domains=("two", domain))
