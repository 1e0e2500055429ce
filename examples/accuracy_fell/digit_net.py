"""A network for 8 x 8 digits with one layer that int8 harms."""

import torch
from torch import nn
from torch.nn import functional


class DigitNet(nn.Module):
    """One unit of `hidden` has weights 1,000 times as large as the others', and never fires."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.head = nn.Linear(64, 10)
        with torch.no_grad():
            self.hidden.weight[0] *= 1000
            self.hidden.bias[0] = -1e5

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        features = functional.max_pool2d(functional.relu(self.conv(images)), 2)
        return self.head(functional.relu(self.hidden(features.flatten(1))))
