"""Adapters made with peft, and their log-probs in transformers, which SGLang's must equal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.adapters import adapter_spec


def bias_without_end(model: Path) -> dict[str, float]:
    """Return a `logit_bias` that forbids the end-of-turn token, so that only a client or a limit ends the reply."""
    return {str(json.loads((model / "config.json").read_text())["eos_token_id"]): -100.0}


class ReferenceWeights:
    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._loaded: dict[str | None, PreTrainedModel | PeftModel] = {None: self._base()}

    def _base(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    def adapter(self, name: str, *, seed: int) -> Path:
        """Return the folder of a random adapter that changes the replies, but keeps them readable."""
        torch.manual_seed(seed)
        config = LoraConfig(r=8, lora_alpha=16, target_modules=sorted(adapter_spec(self.model).target_modules))
        adapted = get_peft_model(self._base(), config)
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.02)
        adapted.save_pretrained(self.folder / name)
        self._loaded[name] = adapted.eval()
        return self.folder / name

    @torch.no_grad()
    def logprobs(
        self,
        adapter: str | None,
        ids: Sequence[int],
        *,
        temperature: float = 1.0,
        logit_bias: Mapping[str, float] | None = None,
    ) -> torch.Tensor:
        """Return the log-prob of each token but the first."""
        logits = self._loaded[adapter](torch.tensor([list(ids)])).logits[0, :-1].float()
        for token, bias in (logit_bias or {}).items():
            logits[:, int(token)] += bias
        logits /= temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
