"""Train a small classifier on scikit-learn's digits with ambiguous labels, with the loss of plsp_kernels.

Every training image carries its true label and each other label with probability 0.5. The script is the whole of
PLSP in one screen: pre-train on all candidates, then in every epoch pick the most reliable instances of each class as
labelled, treat the rest as unlabelled, and train with the semantic upper bound. Takes some seconds on a CPU.

    python examples/digits.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from plsp_kernels import SemanticUpperBoundLoss, class_activation_labels

NUM_CLASSES, NUM_FEATURES = 10, 64
PRETRAIN_EPOCHS, EPOCHS, ITERATIONS = 10, 30, 20
LABELED_PER_CLASS, LABELED_BATCH, UNLABELED_BATCH = 50, 64, 256


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in split)
    return train_x.float(), train_y, test_x.float(), test_y


def ambiguous(labels: Tensor, flip_probability: float) -> Tensor:
    """Candidate sets: the true label, and every other one with the flip probability."""
    candidates = torch.rand(len(labels), NUM_CLASSES) < flip_probability
    return candidates.scatter(1, labels[:, None], True)


def augment(x: Tensor, noise: float) -> Tensor:
    return x + noise * torch.randn_like(x)


def select_labeled(logits: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The instances of highest class activation value for each class, and everyone's most activated candidate."""
    labels = class_activation_labels(logits, candidates)
    own = logits.gather(1, labels[:, None])[:, 0]
    activation = own * (own - 1).abs()
    chosen = [
        members[activation[members].topk(min(LABELED_PER_CLASS, len(members))).indices]
        for members in ((labels == j).nonzero()[:, 0] for j in range(NUM_CLASSES))
    ]
    return torch.cat(chosen), labels


def micro_f1(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(f1_score(labels, model(x).argmax(1), average="micro"))


def main() -> None:
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = load()
    candidates = ambiguous(train_y, flip_probability=0.5)
    print(f"{len(train_x)} training images with {candidates.sum(1).float().mean():.1f} candidate labels each")

    hidden = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()]
    backbone = nn.Sequential(*hidden, nn.Linear(128, NUM_FEATURES), nn.ReLU())
    classifier = nn.Linear(NUM_FEATURES, NUM_CLASSES)
    model = nn.Sequential(backbone, classifier)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    semantic_loss = SemanticUpperBoundLoss(len(train_x), NUM_CLASSES, NUM_FEATURES)

    for _ in range(PRETRAIN_EPOCHS):
        model.train()
        for index in torch.randperm(len(train_x)).split(128):
            log_probability = F.log_softmax(model(augment(train_x[index], 0.1)), dim=1)
            inside = candidates[index].float()
            loss = -(log_probability * inside).sum(1).div(inside.sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"after pre-training on all candidates: micro-F1 {micro_f1(model, test_x, test_y):.3f}")

    for epoch in range(1, EPOCHS + 1):
        model.eval()
        with torch.no_grad():
            labeled, labels = select_labeled(model(train_x), candidates)
        purity = (labels[labeled] == train_y[labeled]).float().mean()
        rest = torch.ones(len(train_x), dtype=torch.bool).index_fill(0, labeled, False).nonzero()[:, 0]
        model.train()
        for _ in range(ITERATIONS):
            x_l = labeled[torch.randint(len(labeled), (LABELED_BATCH,))]
            x_u = rest[torch.randint(len(rest), (UNLABELED_BATCH,))]
            views = [augment(train_x[x_l], 0.1), augment(train_x[x_u], 0.1), augment(train_x[x_u], 0.3)]
            features = backbone(torch.cat(views))
            logits = classifier(features).split([LABELED_BATCH, UNLABELED_BATCH, UNLABELED_BATCH])
            step = semantic_loss(
                *logits,
                classifier.weight,
                labels[x_l],
                candidates[x_u],
                labeled_features=features[:LABELED_BATCH],
                index=x_u,
                strength=0.01 * epoch / EPOCHS,
                ss_weight=epoch / EPOCHS,
            )
            optimizer.zero_grad()
            step.total.backward()
            optimizer.step()
        if epoch % 10 == 0:
            f1 = micro_f1(model, test_x, test_y)
            print(f"epoch {epoch:2d}: micro-F1 {f1:.3f}, labelled set {purity:.1%} right, loss {step.total.item():.3f}")


if __name__ == "__main__":
    main()
