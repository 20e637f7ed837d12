"""This release's migrations, which a test process loads once: Alembic loads all of them for each command."""

from alembic.config import Config
from alembic.script import ScriptDirectory


def load_migrations_once() -> None:
    """Let all commands of Alembic in this process share the migrations, but for folders that a test adds."""
    load = ScriptDirectory.from_config
    loaded: dict[str | None, ScriptDirectory] = {}

    def load_once(config: Config) -> ScriptDirectory:
        if config.get_main_option("version_locations") is not None:
            return load(config)
        folder = config.get_main_option("script_location")
        if folder not in loaded:
            loaded[folder] = load(config)
        return loaded[folder]

    setattr(ScriptDirectory, load.__name__, staticmethod(load_once))
