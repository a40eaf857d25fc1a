"""A GPT as named layers: embed, block1, block2, ..., norm, head.

Pre-norm blocks, learned positions, causal scaled_dot_product_attention, GPT-2's initialisation. The head has
weights of its own: tying it to the embedding would share storage between the first and the last stage.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpipe.config.model import GptModel
from hpcpipe.models.layers import LayerSpec, draw

_STD = 0.02


class Embedding(nn.Module):
    """Token embedding plus position embedding, dropout."""

    def __init__(self, vocab: int, context: int, width: int, *, dropout: float) -> None:
        super().__init__()
        # Made from memory of its own, an embedding does not draw weights that are drawn again below.
        self.token = nn.Embedding(vocab, width, _weight=torch.empty(vocab, width))
        self.position = nn.Embedding(context, width, _weight=torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        draw(self.token.weight, _STD)
        draw(self.position.weight, _STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers (rows, length) to (rows, length, width); length is at most the context."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.dropout(self.token(tokens) + self.position(places))
        return result


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, *, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, length, width) to the same shape."""
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        result: Tensor = self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return result


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), with dropout on each branch."""

    def __init__(self, width: int, heads: int, inner: int, *, depth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, inner)
        self.activation = nn.GELU()
        self.contract = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)
        for linear in (self.attention.qkv, self.expand):
            _init(linear, _STD)
        # Each block adds two branches to the residual stream, whose variance should not grow with depth.
        for linear in (self.attention.project, self.contract):
            _init(linear, _STD / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, length, width) to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: Tensor = x + self.dropout(self.contract(self.activation(self.expand(self.norm2(x)))))
        return result


class Head(nn.Module):
    """Scores of the next token."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, vocab, bias=False)
        draw(self.linear.weight, _STD)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, length, width) to (rows, length, vocab)."""
        result: Tensor = self.linear(x)
        return result


def gpt_layers(model: GptModel, *, vocab: int, context: int) -> list[LayerSpec]:
    """Return the layers of a GPT."""
    inner = max(1, round(model.mlp_ratio * model.width))
    embed = partial(Embedding, vocab, context, model.width, dropout=model.dropout)
    block = partial(Block, model.width, model.heads, inner, depth=model.depth, dropout=model.dropout)
    return [
        LayerSpec(name="embed", factory=embed, on_meta=True),
        *(LayerSpec(name=f"block{number}", factory=block, on_meta=True) for number in range(1, model.depth + 1)),
        LayerSpec(name="norm", factory=partial(nn.LayerNorm, model.width), on_meta=True),
        LayerSpec(name="head", factory=partial(Head, model.width, vocab), on_meta=True),
    ]


def _init(linear: nn.Linear, std: float) -> None:
    draw(linear.weight, std)
    nn.init.zeros_(linear.bias)
