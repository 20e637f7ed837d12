"""The /metrics listener of a process without an API."""

import socket

import httpx2
import pytest
from prometheus_client import Counter

from app.core.process_metrics import serve_metrics
from app.core.settings import Settings
from tests.support.engine_fixture import free_port
from tests.support.metrics_requests import Page


def settings_with(**values: object) -> Settings:
    return Settings().replace({f"observability.{name}": value for name, value in values.items()})


def scrape(port: int) -> Page:
    response = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
    assert response.status_code == 200
    return Page(response.text)


def test_processes_of_one_machine_take_different_ports(capfd: pytest.CaptureFixture[str]) -> None:
    settings = settings_with(metrics_port=free_port())
    counters = [Counter("attune_example", "An example.", registry=None) for _ in range(2)]
    counters[1].inc(3)
    ports = [serve_metrics(settings, "worker", counter) for counter in counters]
    assert ports[0] is not None and ports[1] is not None and ports[0] < ports[1]
    assert [scrape(port)("attune_example_total") for port in ports if port] == [0, 3]
    assert f"worker: metrics on http://127.0.0.1:{ports[1]}/metrics" in capfd.readouterr().err


def test_every_process_shows_its_role_release_and_memory() -> None:
    port = serve_metrics(settings_with(metrics_port=free_port()), "beat")
    assert port is not None
    page = scrape(port)
    [labels] = page.by_name("attune_build_info")
    assert dict(labels)["role"] == "beat" and dict(labels)["version"]
    assert (page("process_resident_memory_bytes") or 0) > 1e6


def test_port_0_serves_none() -> None:
    assert serve_metrics(settings_with(metrics_port=0), "worker") is None


def test_the_ports_of_the_api_and_the_engine_are_left_to_them() -> None:
    first = free_port()
    settings = settings_with(metrics_port=first).replace({"server.port": first, "engine.port": first + 1})
    port = serve_metrics(settings, "worker")
    assert port is not None and port >= first + 2


def test_a_process_without_a_free_port_goes_on_without_metrics(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 65535))
        listener.listen()
        assert serve_metrics(settings_with(metrics_port=65535), "worker") is None
    assert "worker: no metrics, 127.0.0.1 has no free port from 65535 on" in capfd.readouterr().err
