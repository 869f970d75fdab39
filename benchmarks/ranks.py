"""Training over ranks: throughput of 1 and 2 ranks (measured), and what a step communicates (computed).

python -m benchmarks.ranks throughput                   Fashion-MNIST's settings, one thread a rank
python -m benchmarks.ranks communication --ranks 8      cifar100's settings
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from torch import nn

from plsp_train.config import build_config
from plsp_train.models import build_model

FLOAT = 4
SHAPES = {"fmnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100)}


def communication(dataset: str, ranks: int) -> dict[str, float]:
    """Bytes that a rank sends in a step of PLSP, with ring algorithms: an all-reduce of s bytes sends 2 (R-1)/R s,
    an all-gather of s bytes in total (R-1)/R s."""
    config = build_config({"dataset": dataset})
    network = build_model(config.model, *SHAPES[dataset])
    rows = sum(-(-total // ranks) * ranks for total in (config.labeled_batch, *2 * (config.unlabeled_batch,)))
    features = rows * network.num_features * FLOAT
    channels = [norm.num_features for norm in network.modules() if isinstance(norm, nn.BatchNorm2d)]
    share = (ranks - 1) / ranks
    return {
        "gradients": 2 * share * FLOAT * sum(parameter.numel() for parameter in network.parameters()),
        "features": share * features,
        "gradients of features": 2 * share * features,
        # Forward: mean, 1/std and count of every rank are gathered; backward: two sums are reduced.
        "batch norms": sum((ranks - 1) * FLOAT * (2 * c + 1) + 2 * share * FLOAT * 2 * c for c in channels),
    }


def images_per_second(ranks: int, epochs: int, data_root: str) -> float:
    """Median over the semi-supervised epochs of a short run, without the first of them."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        settings = ["--dataset", "fmnist", "--data-root", data_root, "--device", "cpu", "--out", f"{folder}/run"]
        length = ["--pretrain-epochs", "0", "--epochs", str(epochs)]
        subprocess.run(
            [sys.executable, *launcher, "-m", "plsp_train", *settings, *length],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(json.loads(line)["images_per_second"] for line in lines[1:])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("throughput", "communication"))
    parser.add_argument("--dataset", choices=tuple(SHAPES), default="cifar100", help="of the communication")
    parser.add_argument("--ranks", type=int, default=8, help="of the communication")
    parser.add_argument("--epochs", type=int, default=4, help="of a run whose throughput is measured")
    parser.add_argument("--data-root", default="data", help="directory of Fashion-MNIST")
    options = parser.parse_args()
    if options.what == "communication":
        sent = communication(options.dataset, options.ranks)
        for name, count in [*sent.items(), ("total", sum(sent.values()))]:
            print(f"{name:<22} {count / 1e6:8.2f} MB")
        return 0
    found = {ranks: images_per_second(ranks, options.epochs, options.data_root) for ranks in (1, 2)}
    for ranks, speed in found.items():
        print(f"{ranks} ranks: {speed:8.0f} images/s, {speed / found[1]:.2f} times one rank")
    return 0


if __name__ == "__main__":
    sys.exit(main())
