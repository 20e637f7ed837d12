"""A base model as we use it: rows in, the hidden states or log-probs of the wanted tokens out."""

from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.models.lm_head import logprobs_of


class Rows(NamedTuple):
    """B rows of T tokens, padded on the right, and the N tokens in them whose log-probs are wanted.

    Without `mask` every token sees those to its left and stands where its column says. Rows that are trees say
    themselves who sees whom, and at which position a token stands.
    """

    ids_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor  # where the token is predicted: one to the left of where it stands
    targets_N: Tensor
    temperatures_N: Tensor
    mask: Tensor | None = None  # bool [B, 1, T, T]: may the token of a row see that of a column?
    positions_BT: Tensor | None = None


class BaseLM(nn.Module):
    def __init__(self, model: PreTrainedModel, logits_chunk: int) -> None:
        super().__init__()
        self.model = model
        self.logits_chunk = logits_chunk

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.get_decoder().layers
        return layers

    @property
    def masks_allowed(self) -> bool:
        """False where layers look at a window only: they would need a mask of their own."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return set(kinds) == {"full_attention"} and not any(windows)

    def forward(self, rows: Rows, *, states: bool = False) -> Tensor:
        """log_softmax(logits / temperature) at the wanted tokens, in float32.  → [N]; or their `states`  → [N, D]"""
        hidden_ND = self.hidden(rows)
        return hidden_ND.clone() if states else self.logprobs(hidden_ND, rows)

    def hidden(self, rows: Rows) -> Tensor:
        """The last layer's states where a token is wanted.  → [N, D]

        Padding on the right needs no mask: attention looks to the left only.
        Raises ValueError for rows with a mask where none is allowed.
        """
        if rows.mask is not None and not self.masks_allowed:
            raise ValueError("These layers look at a window only, and take no mask but their own.")
        hidden_BTD = self.model.get_decoder()(
            input_ids=rows.ids_BT, attention_mask=rows.mask, position_ids=rows.positions_BT, use_cache=False
        ).last_hidden_state
        return hidden_BTD[rows.rows_N, rows.columns_N]

    def logprobs(self, hidden_ND: Tensor, rows: Rows) -> Tensor:
        """Logits are the widest tensor of all, so they are computed only where a token is wanted."""
        head = self.model.get_output_embeddings()
        return logprobs_of(hidden_ND, head, rows.targets_N, rows.temperatures_N, self.logits_chunk)
