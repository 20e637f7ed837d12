"""Sample replies of the demo model with an adapter, with exact token ids and log-probs: batched decoding in torch.

Suffixes: B concurrent replies, T input tokens, S tokens in the cache, L layers, H heads, D and E halves of a head's
width, C channels, V vocabulary. The adapter is merged into the weights, so that decoding costs nothing extra. A reply
that has ended leaves the batch and the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, log_softmax, rms_norm, scaled_dot_product_attention, silu
from transformers import Qwen2ForCausalLM
from transformers.utils import logging

from alignment.config.trainer import LoRAConfig

MAX_ROWS = 32  # replies that are decoded together by default; prompts of similar length keep the padding small
COMPACT_BELOW = 0.6  # share of unfinished rows at which finished rows are removed, which copies the cache


@dataclass(frozen=True)
class Reply:
    """A sampled reply, including its end token. Example: Reply(ids=(9, 4, 2), logprobs=(-0.1, -1.2, -0.01))"""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Layer(NamedTuple):
    """A layer's weights. Matrices with the same input are concatenated."""

    attention_norm_C: Tensor
    mlp_norm_C: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Cache(NamedTuple):
    """Keys and values of B rows that end in the same column. Shorter rows are padded on the left."""

    keys_LBHSD: Tensor
    values_LBHSD: Tensor
    visible_BS: Tensor  # added to the scores: 0 where a row has a token, −inf where it is padding
    padding_B: Tensor

    def rows(self, index_B: Tensor) -> "Cache":
        keys, values = self.keys_LBHSD[:, index_B], self.values_LBHSD[:, index_B]
        return Cache(keys, values, self.visible_BS[index_B], self.padding_B[index_B])


class Prefix(NamedTuple):
    """Keys and values of the tokens that a prompt begins with."""

    keys_LHSD: Tensor
    values_LHSD: Tensor


class Sampler:
    """Samples at temperature 1 from the base model plus the loaded adapter, or from other weights of its shape."""

    def __init__(
        self,
        base_model: Path,
        lora: LoRAConfig | None = None,
        *,
        max_rows: int = MAX_ROWS,
        shares_prefix: bool = False,
    ) -> None:
        """With `shares_prefix` the tokens that all new prompts of a batch begin with are computed once."""
        logging.disable_progress_bar()
        model = Qwen2ForCausalLM.from_pretrained(base_model, dtype=torch.float32, local_files_only=True)
        config = model.config
        self._weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self._lora = lora or LoRAConfig()
        self._max_rows = max_rows
        self._shares_prefix = shares_prefix
        self._prompts: dict[str, Prefix] = {}  # the last one of each chat
        self._num_layers, self._num_heads = config.num_hidden_layers, config.num_attention_heads
        self._eps, self._end = config.rms_norm_eps, int(config.eos_token_id)
        assert config.num_key_value_heads == self._num_heads, "the demo model shares no keys between heads"
        angles = model.model.rotary_emb(torch.zeros(1), torch.arange(config.max_position_embeddings)[None])
        self._cos_SD, self._sin_SD = (part[0].detach() for part in angles)
        self.load_adapter({})

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Load an adapter, with tensor names as in its file. An empty one gives the base model."""
        self._layers = [self._merge_adapter(f"model.layers.{number}.", adapter) for number in range(self._num_layers)]
        self._prompts.clear()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load full weights, with tensor names as in the base model's file."""
        self._weights |= {name: tensor.detach() for name, tensor in weights.items()}
        if "lm_head.weight" not in weights:  # the output head is the embedding
            self._weights["lm_head.weight"] = self._weights["model.embed_tokens.weight"]
        self.load_adapter({})

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        *,
        chats: Sequence[str] | None = None,
        count: int = 1,
        max_tokens: int = 160,
    ) -> list[list[Reply]]:
        """Return `count` replies to every prompt, of at most `max_tokens` tokens.

        `chats` names the chat of each prompt. The prompts of a chat each begin with the one before, of which nothing is
        computed again until `end_chat`.
        """
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        step = max(1, self._max_rows // count)
        sampled: dict[int, list[Reply]] = {}
        for start in range(0, len(by_length), step):
            chunk = by_length[start : start + step]
            names = chats and [chats[index] for index in chunk]
            replies = self._sample_rows([prompts[index] for index in chunk], names, generator, count, max_tokens)
            sampled |= {index: replies[row * count : (row + 1) * count] for row, index in enumerate(chunk)}
        return [sampled[index] for index in range(len(prompts))]

    def end_chat(self, name: str) -> None:
        """Forget the prompts of a chat."""
        self._prompts.pop(name, None)

    def _sample_rows(
        self,
        prompts: Sequence[Sequence[int]],
        chats: Sequence[str] | None,
        generator: torch.Generator,
        count: int,
        max_tokens: int,
    ) -> list[Reply]:
        cache, hidden_BC = self._compute_prompts(prompts, self._find_prefixes(prompts, chats), max_tokens)
        width = max(map(len, prompts))
        for row, name in enumerate(chats or ()):
            computed = slice(width - len(prompts[row]), width)
            self._prompts[name] = Prefix(
                cache.keys_LBHSD[:, row, :, computed].clone(), cache.values_LBHSD[:, row, :, computed].clone()
            )
        if count > 1:  # a cache row for each reply, copied from its prompt
            row_B = torch.arange(len(prompts)).repeat_interleave(count)
            cache, hidden_BC = cache.rows(row_B), hidden_BC[row_B]
        rows = list(range(count * len(prompts)))  # indices of replies
        ids: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        for column in range(width, width + max_tokens):
            logprobs_BV = log_softmax(linear(hidden_BC, self._weights["lm_head.weight"]), dim=-1)
            ids_B = _sample_tokens(logprobs_BV, generator)
            chosen_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
            unfinished = []
            for position, (row, token, logprob) in enumerate(zip(rows, ids_B.tolist(), chosen_B.tolist(), strict=True)):
                if not ids[row] or ids[row][-1] != self._end:
                    ids[row].append(token)
                    logprobs[row].append(logprob)
                    unfinished += [position] * (token != self._end)
            if not unfinished:
                break
            if len(unfinished) <= COMPACT_BELOW * len(rows):
                rows, index_B = [rows[position] for position in unfinished], torch.tensor(unfinished)
                cache, ids_B = cache.rows(index_B), ids_B[index_B]
            hidden_BC = self._forward(ids_B[:, None], cache, column)
        return [Reply(tuple(reply_ids), tuple(values)) for reply_ids, values in zip(ids, logprobs, strict=True)]

    def _find_prefixes(self, prompts: Sequence[Sequence[int]], chats: Sequence[str] | None) -> dict[int, Prefix]:
        """Return what is computed already of the prompts, by their index."""
        found = {row: self._prompts[name] for row, name in enumerate(chats or ()) if name in self._prompts}
        new = [row for row in range(len(prompts)) if row not in found]
        num_shared = _count_common([prompts[row] for row in new]) if new and self._shares_prefix else 0
        if num_shared:
            shared, _ = self._compute_prompts([prompts[new[0]][:num_shared]], {}, 0)
            found |= dict.fromkeys(new, Prefix(shared.keys_LBHSD[:, 0], shared.values_LBHSD[:, 0]))
        return found

    def _compute_prompts(
        self, prompts: Sequence[Sequence[int]], prefixes: Mapping[int, Prefix], max_tokens: int
    ) -> tuple[Cache, Tensor]:
        """Return a cache with the prompts and room for their replies, and the last hidden states [B, C]."""
        width = max(map(len, prompts))
        padding_B = torch.tensor([width - len(prompt) for prompt in prompts])
        columns, head_width = width + max_tokens, self._cos_SD.shape[1]
        keys = torch.zeros(self._num_layers, len(prompts), self._num_heads, columns, head_width)
        is_padding_BS = torch.arange(columns) < padding_B[:, None]
        visible_BS = torch.zeros(len(prompts), columns).masked_fill(is_padding_BS, -torch.inf)
        cache = Cache(keys, torch.zeros_like(keys), visible_BS, padding_B)
        ids_BT = torch.tensor([[*[0] * (width - len(prompt)), *prompt] for prompt in prompts])
        begin = width - 1  # the first column that some prompt lacks
        for row, prompt in enumerate(prompts):
            padding, num_known = width - len(prompt), 0
            if row in prefixes:
                num_known = prefixes[row].keys_LHSD.shape[-2]
                cache.keys_LBHSD[:, row, :, padding : padding + num_known] = prefixes[row].keys_LHSD
                cache.values_LBHSD[:, row, :, padding : padding + num_known] = prefixes[row].values_LHSD
            begin = min(begin, padding + num_known)
        return cache, self._forward(ids_BT[:, begin:], cache, begin)

    def _forward(self, ids_BT: Tensor, cache: Cache, column: int) -> Tensor:
        """Add T tokens per row to the cache, from `column` on. Return the last token's hidden state [B, C]."""
        B, T = ids_BT.shape
        end = column + T
        columns_T = torch.arange(column, end)
        positions_BT = (columns_T - cache.padding_B[:, None]).clamp(min=0)
        cos_B1TD, sin_B1TD = self._cos_SD[positions_BT][:, None], self._sin_SD[positions_BT][:, None]
        mask_B1TS = cache.visible_BS[:, None, None, :end]
        if T > 1:
            diagonal_TS = columns_T[:, None] == torch.arange(
                end
            )  # padding attends to itself, so that no row of the mask is empty
            later_TS = columns_T[:, None] < torch.arange(end)
            mask_B1TS = mask_B1TS.masked_fill(later_TS, -torch.inf).masked_fill(diagonal_TS, 0.0)
        x_BTC = embedding(ids_BT, self._weights["model.embed_tokens.weight"])
        for layer, keys_BHSD, values_BHSD in zip(self._layers, cache.keys_LBHSD, cache.values_LBHSD, strict=True):
            normed_BTC = rms_norm(x_BTC, x_BTC.shape[-1:], layer.attention_norm_C, self._eps)
            qkv = linear(normed_BTC, layer.qkv, layer.qkv_bias).view(B, T, 3, self._num_heads, -1)
            queries_BHTD, new_keys_BHTD, new_values_BHTD = qkv.permute(2, 0, 3, 1, 4)
            keys_BHSD[:, :, column:end] = _apply_rotary(new_keys_BHTD, cos_B1TD, sin_B1TD)
            values_BHSD[:, :, column:end] = new_values_BHTD
            attended_BHTD = scaled_dot_product_attention(
                _apply_rotary(queries_BHTD, cos_B1TD, sin_B1TD),
                keys_BHSD[:, :, :end],
                values_BHSD[:, :, :end],
                attn_mask=mask_B1TS,
            )
            x_BTC = x_BTC + linear(attended_BHTD.transpose(1, 2).reshape(B, T, -1), layer.out)
            normed_BTC = rms_norm(x_BTC, x_BTC.shape[-1:], layer.mlp_norm_C, self._eps)
            gate, up = linear(normed_BTC, layer.gate_up).chunk(2, dim=-1)
            x_BTC = x_BTC + linear(silu(gate) * up, layer.down)
        return rms_norm(x_BTC[:, -1], x_BTC.shape[-1:], self._weights["model.norm.weight"], self._eps)

    def _merge_adapter(self, prefix: str, adapter: Mapping[str, Tensor]) -> Layer:
        def weight(part: str) -> Tensor:
            down, up = (adapter.get(f"base_model.model.{prefix}{part}.lora_{side}.weight") for side in "AB")
            base = self._weights[f"{prefix}{part}.weight"]
            if down is None or up is None:
                return base
            return base + self._lora.alpha / self._lora.r * up.detach() @ down.detach()

        return Layer(
            self._weights[f"{prefix}input_layernorm.weight"],
            self._weights[f"{prefix}post_attention_layernorm.weight"],
            torch.cat([weight(f"self_attn.{name}_proj") for name in "qkv"]),
            torch.cat([self._weights[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"]),
            weight("self_attn.o_proj"),
            torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
            weight("mlp.down_proj"),
        )


def _count_common(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with, at most all but one of the shortest."""
    shortest = min(map(len, prompts)) - 1
    return next((at for at in range(shortest) if len({prompt[at] for prompt in prompts}) > 1), shortest)


def _apply_rotary(x_BHTD: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor) -> Tensor:
    """Apply the rotary embedding of Qwen2, which rotates the two halves of a head."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_B1TD + torch.cat((-second, first), dim=-1) * sin_B1TD


def _sample_tokens(logprobs_BV: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one token per row by inverse transform sampling. Return [B]."""
    cumulative_BV = logprobs_BV.exp().cumsum(dim=-1)
    point_B1 = torch.rand(len(logprobs_BV), 1, generator=generator) * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, point_B1, right=True)[:, 0].clamp(max=logprobs_BV.shape[-1] - 1)
