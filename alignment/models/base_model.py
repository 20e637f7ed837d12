"""A causal language model that returns hidden states or log-probs of selected tokens only.

Tensor suffixes: B rows, T tokens of a row, N scored tokens of all rows, D hidden size.
"""

from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.models.lm_head import compute_logprobs


class ModelInputs(NamedTuple):
    """B rows of T tokens, padded on the right, and the N tokens in them that are scored.

    Without `attention_mask` attention is causal and a token's position is its column. Rows with shared prefixes that
    branch need an explicit mask and explicit positions.
    """

    input_ids_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor  # the column that predicts the token: one to the left of the token itself
    targets_N: Tensor  # the token ids to score
    temperatures_N: Tensor  # the sampling temperature of each token
    attention_mask: Tensor | None = None  # bool [B, 1, T, T]: whether a query (row) may attend to a key (column)
    position_ids_BT: Tensor | None = None


class BaseLM(nn.Module):
    """A Hugging Face causal language model behind the interface that training needs."""

    def __init__(self, model: PreTrainedModel, logits_chunk: int) -> None:
        super().__init__()
        self.model = model
        self.logits_chunk = logits_chunk

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder layers."""
        layers: nn.ModuleList = self.model.get_decoder().layers
        return layers

    @property
    def supports_attention_mask(self) -> bool:
        """Return whether rows may have an explicit mask: False if any layer uses sliding-window or chunked attention,
        because such layers need masks of their own."""
        config = self.model.config.get_text_config()
        layer_types = getattr(config, "layer_types", None) or ["full_attention"]
        windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return set(layer_types) == {"full_attention"} and not any(windows)

    def forward(self, inputs: ModelInputs, *, return_hidden_states: bool = False) -> Tensor:
        """Return log_softmax(logits / temperature) at the scored tokens, in float32 and nats.  → [N]

        With `return_hidden_states` return the last layer's hidden states there instead.  → [N, D]
        """
        hidden_ND = self.hidden_states(inputs)
        return hidden_ND.clone() if return_hidden_states else self.logprobs(hidden_ND, inputs)

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return the last layer's hidden states at the columns that predict the scored tokens.  → [N, D]

        Right padding needs no mask, because attention is causal.
        Raises ValueError for inputs with a mask if the model does not support one.
        """
        if inputs.attention_mask is not None and not self.supports_attention_mask:
            raise ValueError(
                f"{type(self.model).__name__} has sliding-window or chunked attention layers, which take no explicit "
                'attention mask. Set packing to "chain" or "off".'
            )
        hidden_BTD = self.model.get_decoder()(
            input_ids=inputs.input_ids_BT,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids_BT,
            use_cache=False,
        ).last_hidden_state
        return hidden_BTD[inputs.rows_N, inputs.columns_N]

    def logprobs(self, hidden_ND: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the log-probs of the scored tokens.  [N, D] → [N] float32

        Logits are the largest tensor of a step, so they are computed for scored tokens only.
        """
        head = self.model.get_output_embeddings()
        return compute_logprobs(hidden_ND, head, inputs.targets_N, inputs.temperatures_N, self.logits_chunk)
