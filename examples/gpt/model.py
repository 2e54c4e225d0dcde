"""A small GPT: a decoder-only transformer over characters."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Shape of the model; a checkpoint fits only the shape that it was made with."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int


class Block(nn.Module):
    """Attention to the characters before, then a feed-forward layer, each added to its input."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        joined = self.query_key_value(self.attention_norm(x))
        query, key, value = joined.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Character ids [batch, length] to logits of the next one [batch, length, vocabulary]."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.characters(ids) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, ids: Tensor, length: int, generator: torch.Generator) -> Tensor:
        """Continue `ids` [1, n] by `length` characters drawn from the model's distribution."""
        for _ in range(length):
            logits = self(ids[:, -self.config.context :])[:, -1]
            chances = functional.softmax(logits.float(), dim=-1).cpu()
            drawn = torch.multinomial(chances, num_samples=1, generator=generator)
            ids = torch.cat([ids, drawn.to(ids.device)], dim=1)
        return ids
