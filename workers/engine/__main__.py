"""`python -m workers.engine`: one supervised replica, as the settings describe it."""

import asyncio
import logging
from pathlib import Path

from alignment.config import LoRAConfig
from app.config import Settings, get_settings
from app.db import Database
from app.engine.keys import engine_keys
from workers.base_model import check_version, folder
from workers.engine.launch import EngineSpec
from workers.engine.ledger import DatabaseLedger
from workers.engine.process import refuse_a_taken_port
from workers.engine.supervisor import Supervisor, run_until_signalled


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
        lora_rank=lora.rank,
        lora_modules=lora.target_modules,
        lora_slots=settings.lora_slots,
        tool_call_parser=settings.tool_call_parser,
    )


async def run(settings: Settings) -> None:
    def check(path: Path, manifest_sha256: str) -> None:
        check_version(settings.model, path, manifest_sha256)

    engine = spec(settings)
    refuse_a_taken_port(engine)  # before the ledger hears of a start that would shut out the engine that runs
    db = Database(settings.database)
    supervisor = Supervisor(engine, DatabaseLedger(db, settings, engine.url), check)
    try:
        await run_until_signalled(supervisor)
    finally:
        await db.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run(get_settings()))
