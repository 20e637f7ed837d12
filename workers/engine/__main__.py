"""`python -m workers.engine`: one supervised replica, as the settings describe it."""

import asyncio
import logging
from pathlib import Path

from alignment.artifacts import check_adapter
from alignment.config.trainer import LoRAConfig
from app.core.database import Database
from app.core.settings import Settings, get_settings
from app.inference.keys import engine_keys
from workers.base_model import adapter_spec, check_version, folder
from workers.engine.engine_record import DatabaseLedger
from workers.engine.launch import EngineSpec
from workers.engine.process import refuse_a_taken_port
from workers.engine.supervisor import Supervisor, run_until_signalled
from workers.engine.version_files import Bring, in_place, over_http


def spec(settings: Settings) -> EngineSpec:
    keys, lora = engine_keys(settings), LoRAConfig()
    return EngineSpec(
        python=settings.engine_python,
        model=str(folder(settings.model)),
        api_key=keys.api,
        admin_key=keys.admin,
        log_path=settings.logs_dir / f"{settings.engine_name}.sglang.log",
        host=settings.engine_host,
        port=settings.engine_port,
        device=settings.engine_device,
        dtype=settings.dtype,
        adapters=settings.adaptation == "lora",
        lora_rank=lora.rank,
        lora_modules=lora.target_modules,
        lora_slots=settings.lora_slots,
        tool_call_parser=settings.tool_call_parser,
    )


def bringing(settings: Settings) -> Bring:
    def check(path: Path, manifest_sha256: str) -> None:
        check_version(settings.model, path, manifest_sha256, full=settings.adaptation == "full")

    def check_pulled(path: Path) -> None:
        check_adapter(path, adapter_spec(settings.model))

    if settings.versions_url is None:
        return in_place(check)
    return over_http(str(settings.versions_url), engine_keys(settings).admin, check_pulled, settings.pulled_dir)


async def run(settings: Settings) -> None:
    engine = spec(settings)
    refuse_a_taken_port(engine)  # before the ledger hears of a start that would shut out the engine that runs
    db = Database(settings.database, seconds=settings.database_job_seconds)
    supervisor = Supervisor(engine, DatabaseLedger(db, settings, engine.url), bringing(settings))
    try:
        await run_until_signalled(supervisor)
    finally:
        await db.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run(get_settings()))
