"""Train a small ResNet on images with cross-entropy and with ISDA, the semantic cross-entropy, over three seeds.

ISDA (Wang et al. 2019) augments the features of an image along the directions of its class without sampling: its loss
is an upper bound of the expected cross-entropy. Both losses start from the same weights and see the same batches; all
other settings are the same. Prints the test accuracy of the last epoch of every run, whichever loss it favours.

The data are scikit-learn's digits, or an .npz file with train_images, train_labels, test_images and test_labels (uint8,
NCHW). Takes minutes on a CPU.

    python examples/isda.py
    python examples/isda.py --data cifar10.npz --epochs 15
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from plsp_kernels import SemanticCrossEntropyLoss

SEEDS, BATCH_SIZE, NUM_FEATURES = (0, 1, 2), 128, 64
STRENGTH = 0.5  # λ at the end of the training, as in ISDA's experiments on CIFAR


def load(path: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the images normalised by the training set."""
    if path is None:
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.5, stratify=labels, random_state=0)
        train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)
    else:
        with np.load(path) as file:
            names = ("train_images", "test_images", "train_labels", "test_labels")
            train_x, test_x, train_y, test_y = (torch.as_tensor(file[name]) for name in names)
    train_x, test_x = train_x.float(), test_x.float()
    mean, std = train_x.mean((0, 2, 3), keepdim=True), train_x.std((0, 2, 3), keepdim=True)
    return (train_x - mean) / std, train_y.long(), (test_x - mean) / std, test_y.long()


def augment(images: Tensor) -> Tensor:
    """Shift every image by up to an eighth of its size, and mirror half of them if they are photographs."""
    count, channels, size, _ = images.shape
    padding = size // 8
    offsets = torch.randint(2 * padding + 1, (2, count, 1)) + torch.arange(size)
    mirrored = torch.rand(count, 1) < (0.5 if channels == 3 else 0.0)
    rows, columns = offsets[0], torch.where(mirrored, offsets[1].flip(1), offsets[1])
    padded = F.pad(images, (padding,) * 4)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.convolutions = nn.Sequential(
            first, nn.BatchNorm2d(out_channels), nn.ReLU(), second, nn.BatchNorm2d(out_channels)
        )
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.convolutions(inputs) + self.shortcut(inputs))


def network(channels: int, num_classes: int) -> tuple[nn.Module, nn.Linear]:
    """A ResNet-8: the features and the classifier."""
    stem = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = Block(16, 16, 1), Block(16, 32, 2), Block(32, NUM_FEATURES, 2)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(NUM_FEATURES, num_classes)


def train(data: tuple[Tensor, Tensor, Tensor, Tensor], semantic: bool, seed: int, epochs: int) -> float:
    """Test accuracy after training with cross-entropy or, if semantic, with ISDA."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = data
    num_classes = int(train_y.max()) + 1
    backbone, classifier = network(train_x.shape[1], num_classes)
    model = nn.Sequential(backbone, classifier)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    isda = SemanticCrossEntropyLoss(num_classes, NUM_FEATURES)
    for epoch in range(1, epochs + 1):
        model.train()
        for index in torch.randperm(len(train_x)).split(BATCH_SIZE):
            features, labels = backbone(augment(train_x[index])), train_y[index]
            logits = classifier(features)
            if semantic:
                strength = STRENGTH * epoch / epochs
                loss = isda(logits, classifier.weight, labels, features=features, strength=strength)
            else:
                loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        predictions = torch.cat([model(part).argmax(1) for part in test_x.split(512)])
    return float((predictions == test_y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="an .npz file of images; digits without it")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    data = load(options.data)
    print(f"{len(data[0])} training and {len(data[2])} test images, {options.epochs} epochs")
    for name, semantic in (("cross-entropy", False), ("ISDA", True)):
        accuracies = []
        for seed in SEEDS:
            accuracies.append(train(data, semantic, seed, options.epochs))
            print(f"{name}, seed {seed}: accuracy {accuracies[-1]:.4f}", flush=True)
        mean, std = np.mean(accuracies), np.std(accuracies, ddof=1)
        print(f"{name}: {mean:.4f} ± {std:.4f} over {len(SEEDS)} seeds", flush=True)


if __name__ == "__main__":
    main()
