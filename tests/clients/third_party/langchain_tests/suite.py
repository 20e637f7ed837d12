"""LangChain's own conformance suites for ChatOpenAI and ChatAttune, run by pytest in an environment of their own.

reasons.py lists the tests that fail, and why.
"""

import os
from typing import Any

from attune_client.langchain import ChatAttune
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

BASE_URL, API_KEY = os.environ["ATTUNE_TEST_BASE_URL"], os.environ["ATTUNE_TEST_API_KEY"]


class Connected:
    """What both classes are given. Greedy replies can be repeated; the penalty ends the loops of small models."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        sampling = {"temperature": 0, "frequency_penalty": 1.0, "max_tokens": 200}
        return {"model": "shop", "base_url": BASE_URL, "api_key": API_KEY, **sampling}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "shop@v0"


class TestChatOpenAI(Connected, ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "stream_usage": True}  # of another base_url it is off


class TestChatAttune(Connected, ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAttune


class TestChatAttuneUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAttune

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "shop", "api_key": "sk-attune-x"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"ATTUNE_API_KEY": "sk-attune-x", "ATTUNE_URL": "http://127.0.0.1:9"}
        return (
            environment,
            {"model": "shop"},
            {"openai_api_key": "sk-attune-x", "openai_api_base": "http://127.0.0.1:9/v1"},
        )
