"""The examples, the rule and the defaults of docs/rewards.md are correct."""

import json
import re

from alignment.config.rewards import RewardsConfig
from alignment.signals.judge_prompts import GRADES
from alignment.signals.next_turn import read_next_message
from alignment.signals.rules import RULES, RuleInput
from app.core.settings import REPOSITORY, Settings

TEXT = (REPOSITORY / "docs" / "rewards.md").read_text()
[EXAMPLE] = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
PROSE = " ".join(TEXT.split())
[FUNCTION] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_documented_example_is_valid() -> None:
    config = RewardsConfig.model_validate_json(EXAMPLE)
    assert {source.type for source in config.sources} == {"explicit", "next_turn", "judge", "http", "rule"}
    assert Settings(rewards=json.loads(EXAMPLE)).rewards == config
    hosts = {match.group(1) for match in re.finditer(r'"\w+@([\w.]+)"', TEXT)}
    assert {source.url.split("/")[2].split(":")[0] for source in config.sources if hasattr(source, "url")} <= hosts


def test_documented_rules_and_fields_exist() -> None:
    assert all(f"`{name}`" in TEXT for name in RULES)
    field_names = set(re.findall(r'"(\w+)":', EXAMPLE)) - {"sources", "discount", "spread", "automated_weight_factor"}
    schema = json.dumps(RewardsConfig.model_json_schema())
    assert all(f'"{name}"' in schema for name in field_names)
    assert (min(GRADES), max(GRADES)) == (1, 5)


def test_documented_function_is_a_rule() -> None:
    namespace: dict[str, object] = {"RuleInput": RuleInput}
    exec(FUNCTION, namespace)
    rule = namespace["short_and_kind"]
    rule_input = RuleInput(({"role": "user", "content": "hi"},), {"content": "Yes, please!"}, "stop", "done", 3)
    assert callable(rule) and rule(rule_input) == 1.0


def test_documented_phrases_are_read_as_stated() -> None:
    for phrase in ("That's wrong", "You didn't answer my question"):
        evidence = read_next_message(phrase)
        assert phrase in PROSE and evidence is not None and evidence.value == -1.0
    for phrase in ("no thanks", "thanks in advance", "Perfect timing, my tyre is flat"):
        assert phrase in PROSE and read_next_message(phrase) is None
    for phrase in ("Thanks a lot", "Thank you for your message"):
        evidence = read_next_message(phrase)
        assert phrase in PROSE and evidence is not None and evidence.value == 1.0
