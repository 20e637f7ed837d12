"""Wrong types, unknown names and misspelt names in the settings: each is one sentence that says what to write."""

from pathlib import Path

import pytest

from tests.app.core.test_settings import load, problems

JUDGE = '[[rewards.sources]]\ntype = "judge"\nurl = "http://judge"\nmodel = "m"\n'
GATE = '[[release.gates]]\ntype = "prompts"\nname = "g"\ndataset = "d"\nat_least = 0.5\n'
WRONG_TYPES = {  # TOML has types: what the environment writes as text is no number here, and true is none anywhere
    '[trainer]\nbatch_size = "24"': "trainer.batch_size: it must be a whole number without quotes (it is '24')",
    '[trainer]\nbatch_size = "x"': "trainer.batch_size: it must be a whole number without quotes (it is 'x')",
    "[trainer]\nbatch_size = true": "trainer.batch_size: it must be a whole number (it is true)",
    "[trainer]\nbatch_size = 24.5": "trainer.batch_size: it must be a whole number (it is 24.5)",
    "[trainer]\nbatch_size = 2026-01-01": "trainer.batch_size: it must be a whole number",
    '[trainer]\nkl_guard = "0.1"': "trainer.kl_guard: it must be a number without quotes (it is '0.1')",
    "[trainer]\nkl_guard = true": "trainer.kl_guard: it must be a number (it is true)",
    "[trainer.optim]\nbetas = [0.9, true]": "trainer.optim.betas.1: it must be a number (it is true)",
    '[observability]\nlength_range = ["1", 80]': "observability.length_range.0: it must be a whole number without "
    "quotes (it is '1')",
    "[server]\nconsole = 1": "server.console: it must be true or false (it is 1)",
    '[server]\nconsole = "yes"': "server.console: it must be true or false without quotes (it is 'yes')",
    '[release.canary]\nshare = "0.1"': "release.canary.share: it must be a number without quotes (it is '0.1')",
    '[release]\ncanary = "false"': "release.canary: it must be a table, e.g. {share = 0.05}, in a variable JSON (it is "
    "'false')",
    "[privacy.retention]\nturns = true": "privacy.retention.turns: it must be a number (it is true)",
    "[algorithm.kl_control]\ntarget = '0.01'": "algorithm.kl_control.target: it must be a number without quotes (it is "
    "'0.01')",
    f"{JUDGE}per_hour = '3'": "rewards.sources.0.per_hour: it must be a whole number without quotes (it is '3')",
    '[[rewards.sources]]\ntype = "explicit"\nlabels = {wrong = true}': "rewards.sources.0.labels.wrong: it must be a "
    "number (it is true)",
    "home = 5": "home: it must be a path in quotes (it is 5)",
    "policy = 5": "policy: input should be a valid string (it is 5)",
}
UNKNOWN_NAMES = {  # in a table with a `type`, whose names count
    f"{JUDGE}api_key = 'k'": "rewards.sources.0.api_key is not a setting; did you mean rewards.sources.0.key?",
    f"{JUDGE}rubrik = 'r'": "rewards.sources.0.rubrik is not a setting; did you mean rewards.sources.0.rubric?",
    f"{JUDGE}function = 'f'": 'rewards.sources.0.function does not belong to type = "judge"',
    '[[rewards.sources]]\ntype = "explicit"\nzz = 1': "rewards.sources.0.zz is not a setting; known are name, weight, "
    "window_seconds, correction, labels",
    '[algorithm]\ntype = "kto"\nbetta = 1': "algorithm.betta is not a setting; did you mean algorithm.beta?",
    '[algorithm]\ntype = "kto"\nclip_lo = 0.1': "algorithm.clip_lo is not a setting; known are epochs, minibatches, "
    "max_kl, beta, kind, desirable_weight, undesirable_weight, correction",
    "[algorithm]\nclip_lo = 0.1": "algorithm.clip_lo is not a setting; did you mean algorithm.clip_low?",
    "[algorithm]\ncorrection = {hihg = 1}": "algorithm.correction.hihg is not a setting; did you mean "
    "algorithm.correction.high?",
    f'{GATE}verifier = {{type = "regex", pattern = "a", patern = "a"}}': "release.gates.0.verifier.patern is not a "
    "setting; did you mean release.gates.0.verifier.pattern?",
}
ALGORITHMS = "dapo, dpo, dr_grpo, gigpo, grpo, kto, length_aware_ppo, online_dpo, ppo, reinforce++, rloo"
MISSPELT = {
    'algorithm = "grppo"': f"there is no algorithm 'grppo'; did you mean 'grpo'? Known are {ALGORITHMS}, and a class "
    "of your own is module:Class",
    'algorithm = "PPO"': f"there is no algorithm 'PPO'; did you mean 'ppo'? Known are {ALGORITHMS}, and a class of "
    "your own is module:Class",
    '[algorithm]\ntype = "dr-grpo"': "algorithm.type: input should be one of 'ppo', 'length_aware_ppo', 'grpo', "
    "'dr_grpo', 'dapo', 'gigpo', 'rloo', 'reinforce++', 'dpo', 'online_dpo', 'kto', 'custom', not 'dr-grpo'; did you "
    "mean 'dr_grpo'?",
    '[algorithm]\nloss = "gsppo"': "there is no policy loss 'gsppo'; did you mean 'gspo'? Known are cispo, dppo_tv, "
    "gspo, ppo, reinforce, sapo",
    '[[rewards.sources]]\ntype = "judje"': "rewards.sources.0.type: input should be one of 'explicit', 'next_turn', "
    "'judge', 'http', 'rule', 'learned', not 'judje'; did you mean 'judge'?",
    '[[release.gates]]\ntype = "metrics"': "release.gates.0.type: input should be one of 'metric', 'function', "
    "'prompts', not 'metrics'; did you mean 'metric'?",
    f'{GATE}verifier = {{type = "zebra"}}': "release.gates.0.verifier.type: input should be one of 'exact', "
    "'contains', 'number', 'regex', 'json_schema', 'choice', 'custom', not 'zebra'",
}


@pytest.mark.parametrize(("text", "expected"), [*WRONG_TYPES.items(), *UNKNOWN_NAMES.items()])
def test_wrong_type_and_unknown_name_in_a_file_are_one_sentence(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text) == [f"FILE: {expected}"]


@pytest.mark.parametrize(("text", "expected"), MISSPELT.items())
def test_misspelt_name_is_told_the_nearest_and_all(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text) in ([expected], [f"FILE: {expected}"])


def test_names_of_the_algorithm_are_those_of_its_type_in_variables_too(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, 'algorithm = "kto"', ALGORITHM__CLIP_LO="0.1")
    assert problem.startswith("ATTUNE_ALGORITHM__CLIP_LO is not a setting; known are epochs, ")
    [problem] = problems(tmp_path, 'algorithm = "kto"', ALGORITHM__CLIP_LOW="0.1")
    assert problem == 'ATTUNE_ALGORITHM__CLIP_LOW: algorithm.clip_low does not belong to type = "kto"'


def test_text_of_variables_is_parsed_and_whole_floats_are_integers(tmp_path: Path) -> None:
    variables = {"TRAINER__BATCH_SIZE": "24", "SERVER__CONSOLE": "no", "TRAINER__KL_GUARD": "5e-2"}
    variables |= {"LIMITS__MAX_PROMPT_CHARS": "1e5", "RELEASE__CANARY": "false", "ALGORITHM__EPOCHS": "2"}
    settings = load(tmp_path, "[trainer]\nmicro_batch_tokens = 1e4\n[trainer.optim]\nlr = 1", **variables).settings
    assert (settings.trainer.batch_size, settings.server.console, settings.trainer.kl_guard) == (24, False, 0.05)
    assert (settings.limits.max_prompt_chars, settings.release.canary, settings.algorithm.epochs) == (100_000, None, 2)
    assert (settings.trainer.micro_batch_tokens, settings.trainer.optim.lr) == (10_000, 1.0)


def test_a_wrong_type_that_a_variable_overrides_does_not_matter(tmp_path: Path) -> None:
    assert load(tmp_path, '[trainer]\nbatch_size = "24"', TRAINER__BATCH_SIZE="12").settings.trainer.batch_size == 12
