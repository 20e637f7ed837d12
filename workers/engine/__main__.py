"""`python -m workers.engine`: run one supervised engine, configured by the settings."""

import asyncio
import logging
from functools import partial
from pathlib import Path

from alignment.artifacts.specs import check_adapter
from app.core.database import Database
from app.core.settings import Settings, get_settings
from app.inference.client import load_engine_keys
from workers.base_model import adapter_spec, check_version, model_dir
from workers.engine.engine_record import DatabaseEngineRecord
from workers.engine.sglang_process import EngineSpec, require_free_port
from workers.engine.supervisor import Supervisor, run_until_signalled
from workers.engine.version_files import VersionOpener, downloaded_versions, local_versions


def engine_spec(settings: Settings) -> EngineSpec:
    keys = load_engine_keys(settings)
    return EngineSpec(
        python=settings.engine_python,
        model=str(model_dir(settings.model)),
        api_key=keys.api,
        admin_key=keys.admin,
        log_path=settings.logs_dir / f"{settings.engine_name}.sglang.log",
        host=settings.engine_host,
        port=settings.engine_port,
        device=settings.engine_device,
        dtype=settings.dtype,
        enable_lora=settings.adaptation == "lora",
        lora_slots=settings.lora_slots,
        tool_call_parser=settings.tool_call_parser,
    )


def version_opener(settings: Settings) -> VersionOpener:
    """Return the opener of local files, or of downloaded files where `versions_url` is set."""
    if settings.versions_url is None:
        return local_versions(partial(check_version, settings.model, full_weights=settings.adaptation == "full"))

    def check_downloaded(path: Path) -> None:
        check_adapter(path, adapter_spec(settings.model))

    admin_key = load_engine_keys(settings).admin
    return downloaded_versions(str(settings.versions_url), admin_key, check_downloaded, settings.pulled_dir)


async def run(settings: Settings) -> None:
    engine = engine_spec(settings)
    require_free_port(engine)  # before a start is recorded, which would take the traffic from an engine that runs
    async with Database(settings.database, seconds=settings.database_job_seconds) as db:
        record = DatabaseEngineRecord(db, settings, engine.url)
        await run_until_signalled(Supervisor(engine, record, version_opener(settings)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run(get_settings()))
