"""The walls: arrows point one way, and every word has one home."""

import subprocess
import sys
from pathlib import Path

from alembic.command import check

from app.core.migrate import alembic_config
from app.core.settings import REPOSITORY

HEAVY = ("torch", "transformers", "peft", "sglang")


def test_the_import_contracts_hold() -> None:
    linted = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert linted.returncode == 0, linted.stdout


def test_the_front_of_house_starts_without_torch() -> None:
    program = "import sys, app.main, app.cli.main; print([name for name in sys.argv[1:] if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program, *HEAVY], cwd=REPOSITORY, capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]", loaded.stdout + loaded.stderr


def test_only_two_rooms_name_sglang() -> None:
    named = {
        path.relative_to(REPOSITORY).parts[:2]
        for folder in ("app", "alignment", "workers", "migrations")
        for path in (REPOSITORY / folder).rglob("*.py")
        if "import sglang" in (text := path.read_text()) or "from sglang" in text or "/load_lora_adapter" in text
    }
    assert named <= {("app", "inference"), ("workers", "engine")}


def test_only_the_settings_read_the_environment() -> None:
    readers = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "app").rglob("*.py")
        if "os.environ[" in (text := path.read_text()) or "os.environ.get" in text or "getenv" in text
    }
    assert readers == set()


def test_the_migrations_make_the_tables_that_the_models_describe(database_url: str) -> None:
    check(alembic_config(database_url))
