"""The policy: trunk and adapter, asked for the log-probs of given tokens and nothing else.

It is the root that FSDP gathers, so all use of the model goes through `forward`.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from alignment.config import LoRAConfig
from alignment.model import adapter, load, shard


class Rows(NamedTuple):
    """B rows of T tokens, padded on the right, and the N tokens in them whose log-probs are wanted."""

    ids_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor  # where the token is predicted: one to the left of where it stands
    targets_N: Tensor
    temperatures_N: Tensor


class PolicyModel(nn.Module):
    def __init__(self, base_model: Path, lora: LoRAConfig, dtype: str, device: torch.device) -> None:
        super().__init__()
        self.model = load.load_base(base_model, dtype, device)
        adapter.attach(self.model, lora)

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.model.get_decoder().layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    def adapter(self) -> dict[str, nn.Parameter]:
        return adapter.parameters(self.model)

    @torch.no_grad()
    def wear(self, tensors: dict[str, Tensor]) -> None:
        """Take on an adapter, given whole; every rank keeps its share."""
        for name, parameter in self.adapter().items():
            parameter.copy_(shard.like(tensors[name], parameter))

    def forward(self, rows: Rows) -> Tensor:
        """log_softmax(logits / temperature) at the wanted tokens, in float32.  → [N]

        Padding on the right needs no mask: attention looks to the left only. And logits are the widest
        tensor of all, so they are computed only where a token is wanted.
        """
        hidden_BTD = self.model.get_decoder()(input_ids=rows.ids_BT, use_cache=False).last_hidden_state
        hidden_ND = hidden_BTD[rows.rows_N, rows.columns_N]
        logits_NV = self.model.get_output_embeddings()(hidden_ND).float()
        return -cross_entropy(logits_NV / rows.temperatures_N[:, None], rows.targets_N, reduction="none")
