"""Train a small residual network on 8 x 8 handwritten digits: python train_digits.py --epochs 12"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

DIGITS = Path(__file__).parents[2] / "plugins" / "ptpipe_data" / "digits.npz"


class Digits(Dataset):
    """Images as float tensors (1, 8, 8), and their digits."""

    def __init__(self, path):
        content = np.load(path)
        self.images, self.labels = content["images_NHW"], content["labels_N"]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).float() / 16
        return (image[None] - 0.305) / 0.376, int(self.labels[index])


def make_datasets(path=DIGITS, split_seed=0):
    """The last quarter of the digits, which others wrote, is for the test; a tenth of the rest for validation."""
    digits = Digits(path)
    num_rest = len(digits) * 3 // 4
    order = np.random.default_rng(split_seed).permutation(num_rest)
    train, val = np.sort(order[num_rest // 10 :]), np.sort(order[: num_rest // 10])
    test = range(num_rest, len(digits))
    return {"train": Subset(digits, train), "val": Subset(digits, val), "test": Subset(digits, test)}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        y = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(x + self.norm2(self.conv2(y)))


class DigitNet(nn.Module):
    def __init__(self, width=16, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block = Block(width)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Sequential(nn.Linear(width * 16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, num_classes))

    def forward(self, x):
        x = self.pool(self.block(self.stem(x)))
        return self.head(x.flatten(1))


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="digits.pt")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    datasets = make_datasets()
    train = DataLoader(datasets["train"], batch_size=32, shuffle=True)
    val, test = (DataLoader(datasets[name], batch_size=512) for name in ("val", "test"))
    model = DigitNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss_function(model(images), labels).backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: val accuracy {accuracy(model, val):.4f}")
    torch.save(model.state_dict(), args.save)
    print(f"test accuracy {accuracy(model, test):.4f}")


if __name__ == "__main__":
    main()
