"""`python -m workers.engine`: run one supervised engine, configured by the settings."""

import argparse
import asyncio
from functools import partial
from pathlib import Path

from alignment.artifacts.specs import check_adapter
from app.core.database import Database
from app.core.process_metrics import PoolMetrics, serve_metrics
from app.core.request_log import configure_logging
from app.core.settings import Settings, get_settings
from app.inference.keys import load_engine_keys
from workers.base_model import adapter_spec
from workers.engine.engine_record import DatabaseEngineRecord
from workers.engine.process import require_free_port
from workers.engine.specs import engine_spec
from workers.engine.start_versions import start_versions_of
from workers.engine.supervisor import Supervisor, SupervisorTimeouts, run_until_signalled
from workers.engine.version_files import VersionOpener, downloaded_versions, local_versions
from workers.stage_metrics import ENGINE_METRICS


def version_opener(settings: Settings) -> VersionOpener:
    """Return the opener of local files, or of downloaded files where `versions_url` is set."""
    if settings.engine.versions_url is None:
        return local_versions(partial(start_versions_of(settings).check, settings))

    def check_downloaded(path: Path) -> None:
        check_adapter(path, adapter_spec(settings))

    admin_key = load_engine_keys(settings).admin
    return downloaded_versions(str(settings.engine.versions_url), admin_key, check_downloaded, settings.pulled_dir)


async def run(settings: Settings, ready_file: Path | None = None) -> None:
    engine = engine_spec(settings)
    require_free_port(engine)  # before a start is recorded, which would take the traffic from an engine that runs
    async with Database(settings.database_url, seconds=settings.database.job_timeout_seconds) as db:
        serve_metrics(settings, "engine", PoolMetrics(lambda: db.num_connections_in_use), *ENGINE_METRICS)
        record = DatabaseEngineRecord(db, settings, engine.url, ready_file)
        timeouts = SupervisorTimeouts(
            start=settings.engine.start_timeout_seconds,
            response_timeout=settings.engine.response_timeout_seconds,
            drain=settings.server.shutdown_seconds,
        )
        await run_until_signalled(Supervisor(engine, record, version_opener(settings), timeouts=timeouts))


if __name__ == "__main__":
    configure_logging(get_settings().observability.log_format, "engine", "INFO")
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path)
    asyncio.run(run(get_settings(), parser.parse_args().ready_file))
