"""An API process with other settings for a harness, and its metrics as Prometheus parses them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from app.main import create_app
from tests.support.deployment import Harness
from tests.support.settings import by_path


@asynccontextmanager
async def serve_with_settings(harness: Harness, **settings: Any) -> AsyncIterator[Harness]:
    """Yield the harness with an API process of its own, which has other settings."""
    changed = harness.settings.replace(by_path(settings))
    app = create_app(changed)
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {harness.key}"}
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://attune", headers=headers) as api,
    ):
        yield replace(harness, settings=changed, _api=api)


class Page:
    """The samples of /metrics by name and labels. A duplicate sample, which Prometheus refuses, fails the test."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"duplicate sample: {key}"
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))

    def by_name(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        return {labels: value for (sample_name, labels), value in self.samples.items() if sample_name == name}


async def page(harness: Harness) -> Page:
    answer = await harness.api.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Page(answer.text)
