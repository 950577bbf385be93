"""Matrix products of a few rows in float32 on CPU: what a decode step of a few sequences mostly is.

For 4 to 15 rows torch's one product takes up to twice the time of a batch of products with 16 to 64 outputs each. The
batch is a view of the same weights. Its sums differ by rounding only, as they do from one number of rows to another.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import linear

FEW_ROWS = range(4, 16)
PANEL_OUTPUTS = 64
LEAST_PANEL_OUTPUTS = 16


class PanelLinear(torch.nn.Linear):
    """Computes what `layer` computes, with its weights."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        width = math.gcd(layer.out_features, PANEL_OUTPUTS)
        self._panels = layer.weight.detach().view(-1, width, layer.in_features).transpose(1, 2)
        self._few_rows = FEW_ROWS if width >= LEAST_PANEL_OUTPUTS else range(0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.numel() // self.in_features
        if num_rows not in self._few_rows:
            return linear(input, self.weight, self.bias)
        rows = input.reshape(num_rows, self.in_features)
        panels = torch.bmm(rows.expand(len(self._panels), *rows.shape), self._panels)
        output = panels.transpose(0, 1).reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output.add_(self.bias)


def split_into_panels(module: torch.nn.Module) -> None:
    """Replace every plain linear layer below `module`."""
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear:
            setattr(module, name, PanelLinear(child))
        else:
            split_into_panels(child)
