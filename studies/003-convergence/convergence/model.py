"""The small model: a byte-level GPT whose weights may be bf16 while its arithmetic is fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

VOCABULARY, CONTEXT = 256, 64
WIDTH, LAYERS, HEADS = 80, 2, 4


class Fp32Linear(nn.Linear):
    """A linear layer without bias that multiplies in fp32, whatever its weight's dtype; the gradient has that dtype.

    bf16 products of this size are slower than fp32 on a CPU, and rounding activations is not what is studied here.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float())


class Fp32Norm(nn.LayerNorm):
    """A LayerNorm over WIDTH in fp32, whatever the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Block(nn.Module):
    """Attention and a perceptron four times as wide, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Fp32Norm(), Fp32Norm()
        self.qkv, self.out = Fp32Linear(WIDTH, 3 * WIDTH), Fp32Linear(WIDTH, WIDTH)
        self.up, self.down = Fp32Linear(WIDTH, 4 * WIDTH), Fp32Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, n, WIDTH], fp32."""
        batch, n, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, n, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, n, WIDTH))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + added


class SmallGPT(nn.Module):
    """Bytes in, logits of the next byte out; separate input and output embeddings; 0.20 million parameters.

    Args:
        seed: of the initial weights: normal with deviation 0.02, smaller where a layer adds to the residual stream.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = Fp32Norm(), Fp32Linear(WIDTH, VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if adds else 0.02, generator=generator)

    def forward(self, sequences: Tensor) -> Tensor:
        """Mean cross-entropy in nats of each byte after the first; sequences: [batch, n + 1], int64, n <= CONTEXT."""
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        x = self.tokens(inputs).float() + self.places.weight[: inputs.shape[1]].float()
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
