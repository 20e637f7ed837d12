"""lm-evaluation-harness's `local-chat-completions`, which shows texts alone: metadata names the request."""

import json
import os
from typing import Any

from client_program import API_KEY, BASE_URL, MAX_TOKENS, MESSAGES, MODEL, TEMPERATURE, new_metadata, report
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.api_models import JsonChatStr

os.environ["OPENAI_API_KEY"] = API_KEY


def chat() -> dict[str, Any]:
    url = f"{BASE_URL}/chat/completions"
    model: Any = get_model("local-chat-completions")(base_url=url, model=MODEL, max_retries=1, tokenized_requests=False)
    metadata = new_metadata()
    sampling = {"until": ["\n\n"], "max_gen_toks": MAX_TOKENS, "temperature": TEMPERATURE, "metadata": metadata}
    arguments = (JsonChatStr(json.dumps(MESSAGES)), sampling)
    request = Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0, metadata=("shop", 0, 1))
    [text] = model.generate_until([request])
    return {"id": None, "metadata": metadata, "text": text}


report(chat=chat)
