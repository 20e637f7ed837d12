"""The commands' HTTP client: ATTUNE_URL over TLS, and which key is sent where."""

import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.errors import ServiceRefusal
from alignment.environments.protocols import Agent, Task
from alignment.environments.worlds import StepsWorld
from app.cli import environments
from app.cli.main import app
from app.core.settings import Settings, get_settings
from tests.support.cli import run
from tests.support.environments import PLAN, Rooms


@pytest.fixture
def https_url(tmp_path: Path) -> Iterator[str]:
    """Yield the URL of an HTTPS server that knows no API key. `authority.pem` in `tmp_path` is its certificate."""
    write_certificate(tmp_path)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "the key is unknown here"}}')

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "authority.pem", tmp_path / "key.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def write_certificate(folder: Path) -> None:
    """Write a self-signed certificate of 127.0.0.1 to authority.pem, and its key to key.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=1))
    builder = builder.add_extension(address, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem = serialization.Encoding.PEM
    (folder / "authority.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)


def test_service_is_reached_over_tls(https_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ATTUNE_URL", https_url)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "credentials.json").write_text('{"api_key": "sk-attune-local"}')
    outputs = []
    for environment in ({}, {"API_KEY": "sk-attune-x"}, {"CA_FILE": f"{tmp_path}/authority.pem"}):
        for name, value in environment.items():
            monkeypatch.setenv(f"ATTUNE_{name}", value)
        get_settings.cache_clear()
        outputs.append(run(app, ["versions"]).output)
    get_settings.cache_clear()
    assert f"set ATTUNE_API_KEY to a key of {https_url}" in outputs[0], "the saved key is not sent to another service"
    assert "is not trusted" in outputs[1] and "ATTUNE_CA_FILE" in outputs[1]
    assert "the key is unknown here" in outputs[2]
    monkeypatch.setenv("ATTUNE_CA_FILE", f"{tmp_path}/key.pem")
    get_settings.cache_clear()
    assert "has no usable certificate" in run(app, ["versions"]).output
    get_settings.cache_clear()


async def test_chats_of_an_environment_trust_the_same_authorities(https_url: str, tmp_path: Path) -> None:
    settings = Settings(url=https_url, api_key="sk-attune-x", ca_file=tmp_path / "authority.pem")
    environment = LoopEnvironment(lambda: StepsWorld(Rooms()))
    _, status = await environments._run(environment, PLAN, settings)
    assert status == 1, "the service knows no key"
    with pytest.raises(ServiceRefusal, match="the key is unknown here"):
        await environment.run(Task("train-0"), Agent(https_url, "sk-ep-1", "shop"))
    await environment.close()
