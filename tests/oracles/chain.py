"""An independent recurrent EAGLE-3 drafter over a raw state dict: one token at a time, everything spelled out.

Imports nothing of ours. Weights are a checkpoint's tensors by name, settings a plain dict (the fields of a head's
config), rope is the default kind.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Drafts:
    """One chain: logits [steps, Vd], hidden [steps, H] (what lm_head's norm reads), tokens (target ids, argmax)."""

    logits: Tensor
    hidden: Tensor
    tokens: list[int]


class ChainDrafter:
    """Args:
    state: `model.safetensors` of a head (or its state dict).
    config: hidden sizes, heads, options.
    embedding: the target's embedding rows as the model uses them [V, H]; unused if the head owns one.
    """

    def __init__(self, state: dict[str, Tensor], config: dict[str, Any], embedding: Tensor):
        self.w = {name: x.detach().cpu() for name, x in state.items()}
        self.c = config
        self.embedding = self.w.get("embed_tokens.weight", embedding)

    def chains(self, features: Tensor, ids: list[int], steps: int, known: bool = False) -> list[Drafts]:
        """The chain of every root of one document.

        Args:
            features: [S, F] of positions 0..S-1.
            ids: the document's tokens x[0..]; row t's root is x[t+1], so S + 1 of them are read at least.
            known: feed the document's own tokens after the root (teacher forcing) instead of the drafts;
                a chain then ends where the document does.
        Returns:
            entry t: the chain whose root is x[t+1].
        """
        caches = [([], [], []) for _ in range(self.c["num_layers"])]
        out = []
        for t in range(len(features)):
            if t + 1 >= len(ids):
                break
            hidden = self.advance(self.join(features[t]), ids[t + 1], t, caches)
            out.append(self._chain(hidden, ids, t, deepcopy(caches), steps, known))
        return out

    def _chain(self, hidden: Tensor, ids: list[int], t: int, caches: list, steps: int, known: bool) -> Drafts:
        logits, states, tokens = [], [], []
        for k in range(steps):
            states.append(hidden)
            logits.append(self.w["lm_head.weight"] @ self.read(hidden))
            best = int(logits[-1].argmax())
            tokens.append(best + int(self.w["d2t"][best]))
            if known and t + 2 + k >= len(ids):
                break
            following = ids[t + 2 + k] if known else tokens[-1]
            hidden = self.advance(hidden, following, t + 1 + k, caches)
        return Drafts(torch.stack(logits), torch.stack(states), tokens)

    def join(self, feature: Tensor) -> Tensor:
        """fc of the captured states, each normed first where the head has fc_norm."""
        parts = list(feature.split(self.c["target_hidden_size"]))
        if self.c["fc_norm"]:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return self.w["fc.weight"] @ torch.cat(parts)

    def read(self, hidden: Tensor) -> Tensor:
        return hidden if self.c["norm_output"] else self.norm(hidden, "norm")

    def advance(self, hidden: Tensor, token: int, position: int, caches: list) -> Tensor:
        """Feed `token` beside `hidden` at `position`, appending to the caches; the next hidden state [H]."""
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat([self.norm(self.embedding[token], "midlayer.input_layernorm"), normed])
        h = normed if self.c["norm_before_residual"] else hidden
        h = self.block("midlayer", h, x, position, caches[0])
        for i in range(1, self.c["num_layers"]):
            h = self.block(f"layers.{i}", h, self.norm(h, f"layers.{i}.input_layernorm"), position, caches[i])
        return self.norm(h, "norm") if self.c["norm_output"] else h

    def block(self, name: str, residual: Tensor, x: Tensor, position: int, cache: tuple) -> Tensor:
        h = residual + self.attention(f"{name}.self_attn", x, position, cache)
        y = self.norm(h, f"{name}.post_attention_layernorm")
        gate, up = self.w[f"{name}.mlp.gate_proj.weight"] @ y, self.w[f"{name}.mlp.up_proj.weight"] @ y
        return h + self.w[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)

    def attention(self, name: str, x: Tensor, position: int, cache: tuple) -> Tensor:
        heads, kv_heads, dim = (self.c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (self.linear(f"{name}.{p}_proj", x).view(-1, dim) for p in "qkv")
        if self.c["qk_norm"]:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        keys, values, positions = cache
        keys.append(self.rope(k, position))
        values.append(v)
        positions.append(position)
        q = self.rope(q, position)
        window = self.c["sliding_window"] or position + 1
        seen = [i for i, p in enumerate(positions) if p > position - window]
        out = []
        for head in range(heads):
            of = head // (heads // kv_heads)
            scores = torch.stack([q[head] @ keys[i][of] for i in seen]) / math.sqrt(dim)
            weights = (scores - scores.max()).exp()
            weights = weights / weights.sum()
            out.append(sum(w * values[i][of] for w, i in zip(weights, seen, strict=True)))
        return self.w[f"{name}.o_proj.weight"] @ torch.cat(out)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Pair (i, i + d/2) of each head turned by position * theta^(-2i/d)."""
        assert self.c["rope_parameters"].get("rope_type", "default") == "default"
        half = x.shape[-1] // 2
        theta = self.c["rope_parameters"]["rope_theta"]
        angles = position * torch.tensor([theta ** (-i / half) for i in range(half)])
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
