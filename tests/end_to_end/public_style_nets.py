"""A plugin with five networks in the styles of public repositories: in-place skips, shared heads, attention, tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context, Stage, StageConfig, hookimpl, stage
from ptpipe_torch import Data, FunctionRef, Model, Recipe, builder


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )


class UNet(nn.Module):
    """Activations that change a skip in place, in each of their spellings."""

    def __init__(self, channels: int, num_classes: int, size: int) -> None:
        super().__init__()
        self.d1, self.d2, self.d3 = DoubleConv(channels, 8), DoubleConv(8, 16), DoubleConv(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up1, self.u1 = nn.ConvTranspose2d(32, 16, 2, stride=2), DoubleConv(32, 16)
        self.up2, self.u2 = nn.ConvTranspose2d(16, 8, 2, stride=2), DoubleConv(16, 8)
        self.head = nn.Conv2d(8, num_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip1 = self.d1(x)
        F.relu(skip1, inplace=True)
        skip2 = self.d2(self.pool(skip1))
        F.relu_(skip2)
        x = self.d3(self.pool(skip2)).relu_()
        x = F.relu(self.u1(torch.cat([skip2, self.up1(x)], dim=1)), inplace=True)
        x = F.relu(self.u2(torch.cat([skip1, self.up2(x)], dim=1)), inplace=True)
        return self.head(x).mean(dim=(2, 3))


class RetinaHead(nn.Module):
    """One head for all levels of a pyramid."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.cls = nn.Conv2d(width, num_classes, 3, padding=1)

    def forward(self, levels: list[torch.Tensor]) -> torch.Tensor:
        outputs = []
        for level in levels:
            y = self.cls(F.relu(self.conv2(F.relu(self.conv1(level)))))
            n, k, h, w = y.shape
            outputs.append(y.permute(0, 2, 3, 1).reshape(n, h * w, k))
        return torch.cat(outputs, dim=1)


class RetinaNet(nn.Module):
    def __init__(self, channels: int, num_classes: int, size: int) -> None:
        super().__init__()
        self.stem, self.c3, self.c4 = self.unit(channels, 16), self.unit(16, 32), self.unit(32, 32)
        self.l3, self.l4 = nn.Conv2d(32, 24, 1), nn.Conv2d(32, 24, 1)
        self.head = RetinaHead(24, num_classes)

    @staticmethod
    def unit(inputs: int, outputs: int) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c3 = self.c3(self.stem(x))
        p4 = self.l4(self.c4(c3))
        p3 = self.l3(c3) + F.interpolate(p4, size=c3.shape[-2:], mode="nearest")
        return self.head([p3, p4]).mean(1)


class SeparableConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.pointwise = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pointwise(self.depthwise(x))


class EfficientDet(nn.Module):
    """Convolutions shared by levels, batch norms of each level's own."""

    def __init__(self, channels: int, num_classes: int, size: int) -> None:
        super().__init__()
        width = 24
        conv = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(width), nn.SiLU(inplace=True))
        self.down = nn.MaxPool2d(3, 2, 1)
        self.convs = nn.ModuleList(SeparableConv(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2)) for _ in range(2))
        self.act = nn.ReLU6(inplace=True)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        total: Any = 0
        for feature, norms in zip([x, self.down(x)], self.norms, strict=True):
            for conv, norm in zip(self.convs, norms, strict=True):
                feature = self.act(norm(conv(feature)))
            total = total + feature.mean([2, 3])
        return self.fc(total)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attention = (q @ k.transpose(-2, -1)) * self.scale
        x = (self.drop(attention.softmax(dim=-1)) @ v).transpose(1, 2).reshape(n, length, width)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, channels: int, num_classes: int, size: int) -> None:
        super().__init__()
        width, patch = 48, 4
        self.patch = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class TextEncoder(nn.Module):
    """Token ids (pixels in 64 levels), embeddings, `nn.TransformerEncoder`, mean."""

    def __init__(self, channels: int, num_classes: int, size: int) -> None:
        super().__init__()
        width = 32
        self.embed, self.positions = nn.Embedding(64, width), nn.Embedding(channels * size * size, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dense, self.out = nn.Linear(width, width), nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.view(images.size(0), -1)
        ids = (x * 8 + 16).clamp(0, 63).long()
        hidden = self.encoder(self.embed(ids) + self.positions(torch.arange(x.size(1), device=x.device)))
        return self.out(torch.tanh(self.dense(hidden.mean(1))))


NETWORKS: dict[str, Any] = {"unet": UNet, "retina": RetinaNet, "effdet": EfficientDet, "vit": ViT, "text": TextEncoder}


@builder
def public_style(*, name: str, channels: int, num_classes: int, size: int) -> nn.Module:
    network: nn.Module = NETWORKS[name](channels, num_classes, size)
    return network


class NetConfig(StageConfig):
    name: Literal["unet", "retina", "effdet", "vit", "text"]


@stage("model.public_style", packages=("torch",))
def make(config: NetConfig, ctx: Context, data: Data) -> Model:
    """Make a network."""
    info = data.info
    channels, size, _ = info.inputs["images"].shape_CHW
    part = FunctionRef.to(
        public_style, name=config.name, channels=channels, num_classes=info.task.num_classes, size=size
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.seed)
        network = part.resolve("builder")(**part.arguments)
    return Model.from_module(Recipe(part, info.signature), network)


@hookimpl
def ptpipe_stages() -> list[Stage[..., Any]]:
    return [make]
