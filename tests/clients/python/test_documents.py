"""The Python blocks of docs/clients.md run, one after the other, as they stand."""

import os
import re
import sys
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY
from app.models import Feedback, Turn
from tests.support.deployment import Harness

AGENT = f"""#!{sys.executable}
from openai import OpenAI

OpenAI().chat.completions.create(model="shop", messages=[{{"role": "user", "content": "Refund 4712."}}])
"""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


async def test_blocks_run(url: str, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-agent").write_text(AGENT)
    (tmp_path / "my-agent").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTUNE_URL", url)
    monkeypatch.setenv("ATTUNE_API_KEY", harness.key)
    names: dict[str, object] = {}
    blocks = BLOCK.findall((REPOSITORY / "docs" / "clients.md").read_text())
    for block in blocks:
        for text, value in {'"assistant"': '"shop"', "http://127.0.0.1:8700": url, "sk-attune-…": harness.key}.items():
            block = block.replace(text, value)
        exec(compile(block, "docs/clients.md", "exec"), names)
    assert len(blocks) >= 6 and len(await harness.all(Feedback)) == 8
    assert len([turn for turn in await harness.all(Turn) if turn.episode_id is not None]) == 2
