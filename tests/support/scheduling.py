"""Keep the tests of one group on one xdist process, so that one engine, or one browser, serves them.

pytest-xdist has groups for this (`xdist_group`), but it marks them by assigning an attribute that pytest 9.2 no longer
reads. The scheduler sees node ids only, so the tests are known by the files that they are in.
"""

import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler.loadgroup import LoadGroupScheduling  # type: ignore[import-untyped]

ENGINE, BROWSER = "engine", "browser"
GROUPS: dict[str, tuple[str, ...]] = {
    # Every file with a test that uses the fixture `engine` or `vllm_engine`, one real SGLang or vLLM for the whole run.
    ENGINE: (
        "tests/app/inference/test_real_adapters.py",
        "tests/app/inference/test_real_calls.py",
        "tests/app/inference/test_real_capture.py",
        "tests/app/inference/test_real_grammar.py",
        "tests/app/inference/test_real_vllm.py",
        "tests/clients/test_agents_sdk.py",
        "tests/clients/test_curl.py",
        "tests/clients/test_histories.py",
        "tests/clients/test_langchain.py",
        "tests/clients/test_langgraph.py",
        "tests/clients/test_openai.py",
        "tests/clients/test_output_length.py",
        "tests/clients/test_parameters.py",
        "tests/clients/test_reply_ids.py",
        "tests/clients/test_responses.py",
        "tests/clients/third_party/test_langchain_suites.py",
        "tests/clients/third_party/test_open_webui.py",
        "tests/clients/third_party/test_third_party.py",
        "tests/contract/engine/",
        "tests/docker/test_compose.py",
        "tests/journeys/test_backup.py",
        "tests/journeys/test_mixed_fleet.py",
        "tests/journeys/test_postgres_redis.py",
        "tests/journeys/test_rollouts.py",
        "tests/journeys/test_shadow.py",
        "tests/journeys/test_training_loop.py",
        "tests/workers/judging/test_llm_judge.py",
        "tests/workers/test_parity.py",
    ),
    # Each process would build the TypeScript package and start a browser.
    BROWSER: ("tests/app/console/browser/", "tests/clients/typescript/"),
}


class GroupScheduling(LoadGroupScheduling):
    """Send each test to whichever process is free, but those of a group to one."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for group, places in GROUPS.items() if nodeid.startswith(places)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test of the real engine in a file that is not listed: it would start an engine of its own."""
    for item in items:
        uses_engine = not {"engine", "vllm_engine"}.isdisjoint(getattr(item, "fixturenames", ()))
        if uses_engine and not item.nodeid.startswith(GROUPS[ENGINE]):
            file = item.nodeid.partition("::")[0]
            raise pytest.UsageError(f"{item.nodeid} uses the real engine: add {file!r} to GROUPS of {__file__}")
