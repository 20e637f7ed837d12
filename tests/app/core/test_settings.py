"""The settings: the file, the variables, every error, and that every leaf reaches the part it is for."""

import os
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from alignment.config.policy_gradient_algorithms import DAPOConfig, PPOConfig
from alignment.config.preference_algorithms import KTOConfig
from app.cli.main import app
from app.core.settings import REPOSITORY, Settings, get_settings
from app.core.settings.derived import trainer_config
from app.core.settings.loading import LoadedSettings, SettingsError, load_settings
from app.core.settings.reference import reference, show, template
from app.core.settings.renamed import RENAMED
from app.core.settings.tree import find, leaves, variable_name
from tests.support.settings import other_value, to_environment
from workers.engine.specs import engine_spec


def load(folder: Path, text: str = "", **variables: str) -> LoadedSettings:
    """Load a file with this text and these variables, without their prefix."""
    file = folder / "attune.toml"
    file.write_text(text)
    named = {f"ATTUNE_{name}": value for name, value in variables.items()}
    return load_settings({"ATTUNE_CONFIG": str(file), **named})


def problems(folder: Path, text: str = "", **variables: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(folder, text, **variables)
    return [problem.replace(str(folder / "attune.toml"), "FILE") for problem in caught.value.problems]


def test_variables_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    text = '[trainer]\nbatch_size = 48\n[trainer.optim]\nlr = 1e-4\nbetas = [0.9, 0.95]\n[secrets]\njudge = "sk-1"\n'
    loaded = load(tmp_path, text, TRAINER__BATCH_SIZE="12", TRAINER__OPTIM__WEIGHT_DECAY="0.1", SECRETS__RULES="007")
    settings = loaded.settings
    assert (settings.trainer.batch_size, settings.trainer.optim.lr, settings.trainer.kl_guard) == (12, 1e-4, 0.05)
    assert (settings.trainer.optim.betas, settings.trainer.optim.weight_decay) == ((0.9, 0.95), 0.1)
    assert {name: secret.get_secret_value() for name, secret in settings.secrets.items()} == {
        "judge": "sk-1",
        "rules": "007",
    }
    assert loaded.sources["trainer.batch_size"] == "ATTUNE_TRAINER__BATCH_SIZE"
    assert loaded.sources["trainer.optim.lr"] == str(tmp_path / "attune.toml")
    assert settings.is_set("trainer.optim.lr") and not settings.is_set("trainer.kl_guard")


def test_text_stays_text_and_blank_is_unset(tmp_path: Path) -> None:
    settings = load(tmp_path, POLICY="123", ENGINE__NAME="007", DATABASE__URL=" ", RELEASE__GATES="").settings
    assert (settings.policy, settings.engine.name, settings.database.url) == ("123", "007", None)
    assert settings.release.gates == ()


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("", {"ALGORITHM": "kto"}, KTOConfig(epochs=3)),
        ('algorithm = "kto"', {}, KTOConfig(epochs=3)),
        ("[algorithm]\nclip_low = 0.1", {"ALGORITHM__EPOCHS": "1"}, PPOConfig(clip_low=0.1, epochs=1)),
        ('[algorithm]\ntype = "dapo"', {"ALGORITHM__KL_COEF": "0.1"}, DAPOConfig(kl_coef=0.1, epochs=3)),
        ("[algorithm]\nclip_low = 0.1", {"ALGORITHM": "kto"}, KTOConfig(epochs=3)),  # another type replaces the table
        ("", {"ALGORITHM": '{"type": "kto", "beta": 0.3}', "ALGORITHM__BETA": "0.2"}, KTOConfig(beta=0.2, epochs=3)),
    ],
)
def test_algorithm_is_a_name_or_a_table(tmp_path: Path, text: str, variables: dict[str, str], expected: Any) -> None:
    assert load(tmp_path, text, **variables).settings.algorithm == expected


def test_class_of_a_users_own_is_named_by_its_path(tmp_path: Path) -> None:
    algorithm = load(tmp_path, ALGORITHM="my.module:Mine", ALGORITHM__OPTIONS__BETA="2").settings.algorithm
    assert algorithm.type == "custom" and (algorithm.name, algorithm.options) == ("my.module:Mine", {"beta": 2})
    assert "epochs" not in algorithm.model_fields_set


FULL_CANARY = '[trainer]\nadaptation = "full"\n[release.canary]\nshare = 0.1\n'
WRONG_FILES = {  # the file's text, and the sentence
    "[trainer]\nbatch_sise = 4": "FILE: trainer.batch_sise is not a setting; did you mean trainer.batch_size?",
    "[trainer]\neps = 1": "FILE: trainer.eps is not a setting; did you mean trainer.optim.eps?",
    "[trainr]\nranks = 1": "FILE: trainr is not a setting; did you mean trainer?",
    '[algorithm]\ntype = "kto"\nclip_low = 0.1': 'FILE: algorithm.clip_low does not belong to type = "kto"',
    "[trainer]\nmax_batch_size = 12": "FILE: trainer: max_batch_size (12) must be at least batch_size (24)",
    "[trainer]\nmin_batch_size = 25": "FILE: trainer: min_batch_size (25) must be at most batch_size (24)",
    "[trainer]\nkl_target = 0.06": "trainer.kl_target (0.06) must be below trainer.kl_guard (0.05)",
    '[trainer.lora]\ntarget_modules = "q_proj"': "FILE: trainer.lora.target_modules: it must be a list, e.g. "
    """["one", "two"] (it is 'q_proj')""",
    "trainer = 3": "FILE: trainer: it must be a table, e.g. {share = 0.05}, in a variable JSON (it is 3)",
    FULL_CANARY: "a canary or shadow needs two versions side by side; an engine holds one version's full weights",
    "[engine]\nport = 8700": "server.port and engine.port are both 8700 of 127.0.0.1; change one of them",
    '[engine]\ntp_size = 2\ndevice = "cpu"': "engine.tp_size (2) needs as many GPUs, and engine.device is cpu",
    '[server]\ncors_origins = ["shop.example"]': "FILE: server.cors_origins: 'shop.example' is no origin of a browser, "
    "which is a scheme and a host without a path or a final slash, such as https://shop.example",
    '[broker]\nurl = "kafka://geheim@x"': "FILE: broker.url: it must be Redis or RabbitMQ, such as "
    "redis://host:6379/0 or amqp://user:password@host//",
    '[limits]\nurl = "memcached://geheim@x"': "FILE: limits.url: it must be memory:// or the URL of a Redis, such as "
    "async+redis://host:6379/1",
    '[engine]\nextra_flags = ["--api-key=x"]': "FILE: engine.extra_flags: --api-key is set by Attune; see the other "
    "settings of [engine]",
}
WRONG_VARIABLES = {  # a variable without its prefix, its value, and the sentence
    ("TRAINER__BATCH_SISE", "4"): "ATTUNE_TRAINER__BATCH_SISE is not a setting; did you mean "
    "ATTUNE_TRAINER__BATCH_SIZE?",
    ("BATCH_SIZE", "4"): "ATTUNE_BATCH_SIZE is now ATTUNE_TRAINER__BATCH_SIZE (trainer.batch_size in attune.toml)",
    ("LEARNING_RAT", "4"): "ATTUNE_LEARNING_RAT is not a setting; did you mean ATTUNE_TRAINER__OPTIM__LR?",
    (
        "TRAINER__KL_GUARD",
        "-1",
    ): "ATTUNE_TRAINER__KL_GUARD: trainer.kl_guard: input should be greater than 0 (it is -1)",
    ("TRAINER__KL_GUARD", "true"): "ATTUNE_TRAINER__KL_GUARD: trainer.kl_guard: it must be a number (it is 'true')",
    ("TRAINER__OPTIM__BETAS", '["0.9", 0.99]'): "ATTUNE_TRAINER__OPTIM__BETAS: trainer.optim.betas.0: it must be a "
    "number without quotes (it is '0.9')",
    ("ALGORITHM", '{"type": "kto", "epochs": true}'): "ATTUNE_ALGORITHM: algorithm.epochs: it must be a whole number "
    "(it is true)",
    ("ALGORITHM__CLIP_LO", "0.1"): "ATTUNE_ALGORITHM__CLIP_LO is not a setting; did you mean "
    "ATTUNE_ALGORITHM__CLIP_LOW?",
    ("REWARDS__SOURCES", '[{"type": "explicit", "wieght": 1}]'): "ATTUNE_REWARDS__SOURCES: rewards.sources.0.wieght is "
    "not a setting; did you mean rewards.sources.0.weight?",
}


@pytest.mark.parametrize(("text", "expected"), WRONG_FILES.items())
def test_each_problem_of_a_file_is_one_sentence(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text) == [expected]


@pytest.mark.parametrize(("variable", "expected"), WRONG_VARIABLES.items())
def test_each_problem_of_a_variable_is_one_sentence(tmp_path: Path, variable: tuple[str, str], expected: str) -> None:
    assert problems(tmp_path, **dict([variable])) == [expected]


def test_all_problems_are_named_at_once_and_secrets_are_not(tmp_path: Path) -> None:
    text = "[trainer]\nbatch_size = 0\nranks = 0\n[secrets]\njudge = 4711\n"
    found = problems(tmp_path, text, NOTHING_LIKE_IT="1")
    assert len(found) == 4 and "4711" not in "".join(found)


def test_file_that_is_not_toml_or_missing_is_one_sentence(tmp_path: Path) -> None:
    assert problems(tmp_path, "[trainer")[0].startswith("FILE is not valid TOML: ")
    with pytest.raises(SettingsError, match=r"no\.toml cannot be read: No such file"):
        load_settings({"ATTUNE_CONFIG": str(tmp_path / "no.toml")})


def test_variables_of_kubernetes_and_of_the_tests_are_ignored() -> None:
    names = (
        "ATTUNE_PORT",
        "ATTUNE_PORT_8700_TCP_ADDR",
        "ATTUNE_API_SERVICE_HOST",
        "ATTUNE_TEST_POSTGRES",
        "ATTUNE_FULL",
    )
    assert load_settings(dict.fromkeys(names, "tcp://10.0.0.1:8700")).sources == {}


def test_every_earlier_variable_has_a_setting() -> None:
    assert [path for path in RENAMED.values() if find(Settings, tuple(path.split("."))) is None] == []


def test_template_is_the_defaults_and_its_lines_may_be_uncommented(tmp_path: Path) -> None:
    assert load(tmp_path, template()).settings == Settings()
    lines = [line.removeprefix("# ") for line in template().splitlines()]
    settings = [line for line in lines if line.partition(" = ")[0].isidentifier() and not line.endswith("=")]
    tables = [line for line in template().splitlines() if line.startswith("[")]
    assert len(settings) > 100 and len(tables) > 15
    for leaf in leaves(Settings):
        assert any(line.startswith(f"{leaf.path.rpartition('.')[2]} =") for line in lines), leaf.path


def test_shown_values_are_toml_that_gives_the_same_settings(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[trainer]\nbatch_size = 48\n[release]\nshadow = false\n[release.canary]\nshare = 0.1\n")
    shown = show(loaded, with_sources=True)
    assert f"batch_size = 48  # {tmp_path / 'attune.toml'}" in shown and "kl_guard = 0.05  # default" in shown
    tomllib.loads(shown)
    assert "# min_batch_size is not set  # default  # 12 applies" in shown, "a quarter of batch_size"
    (tmp_path / "again").mkdir()
    assert load(tmp_path / "again", shown).settings == loaded.settings


def test_secrets_are_never_printed(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, API_KEY="sk-secret", SECRETS__JUDGE="sk-secret", ENGINE__API_KEY="sk-secret",
        DATABASE__URL="postgresql+psycopg://attune:sk-secret@db/attune", BROKER__URL="redis://:sk-secret@redis/0",
    )  # fmt: skip
    assert "sk-secret" not in show(loaded, with_sources=True) and "postgresql+psycopg://***@db/attune" in show(loaded)
    assert "sk-secret" not in repr(loaded.settings.engine) + repr(loaded.settings.secrets)


# A value of each setting other than its default, where one cannot be derived from its type.
VALUES: dict[str, Any] = {
    "trainer.kl_guard": 0.002,  # it limits the default KL target to half of itself
    "algorithm": KTOConfig(epochs=3),
    "engine.device": "cuda",
    "engine.extra_flags": ("--schedule-policy=lpm",),
    "engine.mem_fraction_static": 0.7,
    "engine.attention_backend": "triton",
    "engine.python": Path("/opt/python"),
    "trainer.adaptation": "full",
    "trainer.optim.betas": (0.5, 0.6),
    "trainer.lora.target_modules": ("q_proj",),
}


def other(path: str, annotation: Any, default: Any) -> Any:
    return VALUES[path] if path in VALUES else other_value(annotation, default)


TRAINER_ONLY = {  # settings of [trainer] that decide about batches and versions, not about the trainer's computations
    "parity_check",
    *("ranks", "batch_size", "max_batch_size", "min_batch_size", "max_wait_seconds", "max_sample_age_seconds"),
    *("max_staleness", "kl_alarms"),
}
ENGINE_ONLY = {
    "start_timeout_seconds",
    "response_timeout_seconds",
    "name",
    "adapter_delivery",
    "versions_url",
    "drain_seconds",
    "weight_swap_wait_seconds",
}


@pytest.mark.parametrize(
    "path",
    [
        leaf.path
        for leaf in leaves(Settings)
        if leaf.path.startswith("trainer.") and leaf.path.split(".")[1] not in TRAINER_ONLY
    ],
)
def test_every_setting_of_the_trainer_reaches_its_configuration(path: str) -> None:
    [leaf] = [leaf for leaf in leaves(Settings) if leaf.path == path]
    before = Settings().replace({"trainer.optim.total_steps": 100})
    after = before.replace({path: other(path, leaf.annotation, leaf.default)})
    assert trainer_config(before) != trainer_config(after)


@pytest.mark.parametrize(
    "path",
    [
        leaf.path
        for leaf in leaves(Settings)
        if leaf.path.startswith("engine.") and leaf.path.split(".")[1] not in ENGINE_ONLY
    ],
)
def test_every_setting_of_the_engine_reaches_its_command_line(tmp_path: Path, path: str) -> None:
    [leaf] = [leaf for leaf in leaves(Settings) if leaf.path == path]
    settings = Settings(home=tmp_path, engine={"api_key": "chat", "admin_key": "admin"})
    changed = settings.replace({path: other(path, leaf.annotation, leaf.default)})
    before, after = engine_spec(settings), engine_spec(changed)
    assert before.command(parent=1) != after.command(parent=1) or before.environment() != after.environment()


def test_every_field_of_trainer_and_engine_has_a_setting(tmp_path: Path) -> None:
    """What the two can be told, an operator can set: each field is a setting, or derived from one."""
    settings = Settings(home=tmp_path)
    paths = {leaf.path.rpartition(".")[2] for leaf in leaves(Settings)} | {"lora", "critic", "optim", "reward_model"}
    derived = {"log_path", "adapter"}  # from `home`, and from the base model and `trainer.lora`
    assert {*type(trainer_config(settings)).model_fields} <= paths
    assert {*asdict(engine_spec(settings))} <= paths | derived


def test_settings_become_variables_and_come_back(tmp_path: Path) -> None:
    values = {"trainer.lora.r": 4, "secrets": {"judge": "sk-1"}, "release.canary": {"share": 0.1}, "algorithm": "kto"}
    settings = Settings().replace(values)
    assert load_settings(to_environment(settings)).settings == settings


def test_every_setting_is_described() -> None:
    undescribed = [leaf.path for leaf in leaves(Settings) if not leaf.description]
    assert undescribed == []
    rows = [line for line in reference().splitlines() if line.startswith("| `") and not line.startswith("| `type`")]
    assert [line for line in rows if line.endswith("|  |")] == []


def test_reference_page_is_generated_and_whole() -> None:
    page = (REPOSITORY / "docs" / "settings.md").read_text()
    assert page == reference(), "run: .venv/bin/attune config reference > docs/settings.md"
    assert all(f"`{leaf.path.rpartition('.')[2]}`" in page for leaf in leaves(Settings))
    assert all(f"`{name}`" in page and f"`{variable_name(path)}`" in page for name, path in RENAMED.items())


def test_config_commands_write_check_and_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    assert run(app, ["config", "init"]).exit_code == 0
    assert isinstance(run(app, ["config", "init"]).exception, ValueError), "a file is never overwritten"
    assert "valid: 0 from attune.toml" in run(app, ["config", "check"]).output
    Path("attune.toml").write_text("[trainer]\nbatch_size = 12\n")
    get_settings.cache_clear()
    assert "batch_size = 12  # attune.toml" in run(app, ["config", "show", "--source"]).output
    get_settings.cache_clear()


def test_a_command_ends_with_the_sentence_before_anything_starts(tmp_path: Path) -> None:
    environment = {**os.environ, "ATTUNE_TRAINER__RANK": "2", "ATTUNE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "app.cli.main", "up"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "ATTUNE_TRAINER__RANK is not a setting; did you mean ATTUNE_TRAINER__RANKS?" in done.stderr
    assert not (tmp_path / "home").exists()
