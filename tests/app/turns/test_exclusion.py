"""Every sentence that says why a turn is excluded has a code. The sentences come from the code that writes them."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from app.chat.request_context import RequestContext
from app.chat.sampling import exclusion_reason
from app.chat.schemas import ChatRequest
from app.inference import capture
from app.inference.request import Sampling
from app.models import LOST_REASON
from app.projects.auth import Caller
from app.turns.exclusion import ExclusionCode, exclusion_code
from workers.rollouts.sampler import PROMPT_MISMATCH

CALLER = Caller("proj", "key", "sk", ("chat",), train=True)
REQUEST = ChatRequest.model_validate({"model": "shop", "messages": [{"role": "user", "content": "hi"}]})
CONTEXT = RequestContext.from_request(REQUEST, {})


@pytest.mark.parametrize(
    ("sampling", "code"),
    [
        ({"temperature": 0.0}, ExclusionCode.GREEDY),
        ({"top_p": 0.5}, ExclusionCode.SAMPLING_CHANGED),
        ({"frequency_penalty": 1.0}, ExclusionCode.SAMPLING_CHANGED),
        ({"logit_bias": {"1": 2.0}}, ExclusionCode.SAMPLING_CHANGED),
    ],
)
def test_reasons_of_requests(sampling: dict[str, object], code: ExclusionCode) -> None:
    changed = replace(Sampling(max_tokens=8), **sampling)  # type: ignore[arg-type]
    reason = exclusion_reason(CALLER, CONTEXT, changed, None)
    assert reason is not None and exclusion_code(reason) == code


def test_other_reasons_of_requests() -> None:
    refused = replace(CALLER, train=False)
    no_consent = exclusion_reason(refused, CONTEXT, Sampling(max_tokens=8), None)
    repeated = exclusion_reason(CALLER, CONTEXT, Sampling(max_tokens=8), "chatcmpl-1")
    assert (no_consent and exclusion_code(no_consent)) == ExclusionCode.NO_CONSENT
    assert (repeated and exclusion_code(repeated)) == ExclusionCode.REPEATED
    assert exclusion_code("its client repeated the request and received chatcmpl-2 instead") == ExclusionCode.REPEATED
    assert exclusion_code(LOST_REASON) == ExclusionCode.SERVER_LOST
    assert exclusion_code(PROMPT_MISMATCH) == ExclusionCode.PROMPT_MISMATCH
    assert exclusion_code("The engine answered with status 500.") == ExclusionCode.OTHER


def test_every_reason_of_the_capture_has_a_code() -> None:
    """Read the sentences from the source, so that a new one without a code is found."""
    tree = ast.parse(Path(capture.__file__).read_text())
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_exclusion_reason"]
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    sentences = [ast.unparse(value).strip("f'\"") for value in values if ast.unparse(value) != "None"]
    assert len(sentences) >= 8  # one for each condition
    assert [text for text in sentences if exclusion_code(text) == ExclusionCode.OTHER] == []
