"""/metrics of one process: what every role exposes, and a small listener for the roles that serve no API.

The API builds its own page (app/ops/metrics.py), with an admin key. The other roles listen on the loopback interface
without a key: their series hold names of projects, policies, engines and reward sources, and nothing that users say.
"""

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.core.settings import Settings

Role = Literal["api", "worker", "beat", "trainer", "engine"]
PORTS_TRIED = 32
disable_created_metrics()  # type: ignore[no-untyped-call] # no time series with the creation times of counters


class PoolMetrics(Collector):
    """The database connections that this process uses; `read` returns their number."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        documentation = "Database connections that this process uses at the moment."
        yield GaugeMetricFamily("attune_db_pool_in_use", documentation, value=self._read())


def process_registry(role: Role, *collectors: Collector) -> CollectorRegistry:
    """Return a registry with these collectors and with what every process exposes: build, CPU, memory, files."""
    registry = CollectorRegistry()
    build = Gauge(
        "attune_build_info", "1, with the release that this process runs.", ("role", "version"), registry=None
    )
    build.labels(role, release()).set(1)
    for collector in (build, ProcessCollector(registry=None), *collectors):
        registry.register(collector)
    return registry


def release() -> str:
    """Return the version of the installed distribution; "unknown" in a source tree that is not installed."""
    try:
        return version("attune-server")
    except PackageNotFoundError:
        return "unknown"


def serve_metrics(settings: Settings, role: Role, *collectors: Collector) -> int | None:
    """Serve this process's metrics from a thread until the process ends.

    The first free port from `observability.metrics_port` on is taken, so that any number of processes may share a
    machine; the ports of the API and the engine are left out. Returns the port, or None where metrics are off or no
    port is free: a process does its work without metrics.
    """
    host, first = settings.observability.metrics_host, settings.observability.metrics_port
    if first == 0:
        return None
    registry = process_registry(role, *collectors)
    reason: object = "no port was tried"
    for port in range(first, min(first + PORTS_TRIED, 65536)):
        if port in (settings.server.port, settings.engine.port):
            continue
        try:
            start_http_server(port, host, registry)
        except OSError as error:
            reason = error
            continue
        print(f"{role}: metrics on http://{host}:{port}/metrics", file=sys.stderr, flush=True)
        return port
    print(f"{role}: no metrics, {host} has no free port from {first} on ({reason})", file=sys.stderr, flush=True)
    return None
