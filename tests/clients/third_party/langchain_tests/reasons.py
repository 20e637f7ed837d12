"""A plug-in of pytest: marks the tests of suite.py that fail on a model, with reasons. One that passes fails then."""

import pytest

TOOL = "the demo model knows one tool, order_status: it calls others on demand alone, and with wrong arguments"
TEXT = "the demo model does not end a text within the tool call or the JSON object before the limit of tokens"
NO_CALL = "SmolLM2-135M was not trained on tools: unless a call is required, it answers in text"
KEYS = "SmolLM2-135M leaves out the key 'punchline': in JSON mode, without a schema, the prompt alone asks for it"
LOADS = "`loads` permits LangChain's own classes alone; docs/clients.md shows the call that permits ChatAttune"
REASONS = {
    "demo": {
        "test_tool_calling[model0]": TOOL,
        "test_tool_calling[model1]": TOOL,
        "test_tool_calling_async": TOOL,
        "test_agent_loop[model0]": TOOL,
        "test_agent_loop[model1]": TOOL,
        "test_unicode_tool_call_integration": TEXT,
        "test_structured_output[pydantic]": TEXT,
        "test_structured_output[typeddict]": TEXT,
        "test_structured_output[json_schema]": TEXT,
        "test_structured_output_async[pydantic]": TEXT,
        "test_structured_output_async[typeddict]": TEXT,
        "test_structured_output_async[json_schema]": TEXT,
        "test_structured_output_pydantic_2_v1": TEXT,
        "test_structured_output_optional_param": TEXT,
        "test_json_mode": TEXT,
    },
    "smollm2": {
        "test_agent_loop[model0]": NO_CALL,
        "test_agent_loop[model1]": NO_CALL,
        "test_json_mode": KEYS,
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures-of", choices=sorted(REASONS), help="the model whose failures are expected")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = REASONS.get(config.getoption("--failures-of"), {})
    for item in items:
        if item.nodeid.endswith("TestChatAttuneUnit::test_serdes"):
            item.add_marker(pytest.mark.xfail(reason=LOADS, raises=ValueError, strict=True))
        elif "Unit" not in item.nodeid and (reason := reasons.get(item.nodeid.rpartition("::")[2])) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
