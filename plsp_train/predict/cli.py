"""The command line: `python -m plsp_train.predict`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plsp_train.command import Parser
from plsp_train.output_file import output_path
from plsp_train.run_files import SELECTED_MODELS, model_of

if TYPE_CHECKING:
    import torch

    from plsp_train.model_file import TrainedModel

_EXPORTS = {"onnx": ".onnx", "torch": ".pt2"}
_EPILOG = """examples:
  python -m plsp_train.predict runs/mine new.csv -o labels.csv
  python -m plsp_train.predict runs/mine photos/ -o labels.csv --probabilities
  python -m plsp_train.predict runs/mine new.npz -o labels.npz --features --selected covering-rate
  python -m plsp_train.predict runs/mine --export onnx -o mine.onnx

An exported network takes any number of raw inputs and returns logits: images as uint8 (N, C, H, W) of the size that it
was trained on, or vectors as float32 (N, d). It normalises them itself.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m plsp_train.predict",
        description="Label new inputs with a trained model, or export its network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="directory of a finished run, or its model.pt")
    inputs = "what to label: .npz, .mat, .csv, .parquet, an image or a folder of images; labels in it are not used"
    parser.add_argument("input", metavar="INPUT", nargs="?", help=inputs)
    parser.add_argument("-o", "--out", required=True, help="file to write: .csv or .npz; with --export .onnx or .pt2")
    parser.add_argument("--probabilities", action="store_true", help="also write the probability of every class")
    parser.add_argument("--features", action="store_true", help="also write the deep features")
    selected = "use the epoch that this criterion selected instead of the last one"
    parser.add_argument("--selected", choices=tuple(SELECTED_MODELS), help=selected)
    export = "write the network with its normalisation as an ONNX model or a torch.export program, after checking it"
    parser.add_argument("--export", choices=tuple(_EXPORTS), help=export)
    plugin = "modules that the network may be imported from, separated by commas"
    parser.add_argument("--plugin", default="", metavar="MODULES", help=plugin)
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:i (default: auto)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="inputs computed at a time; fewer need less memory")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 invalid input."""
    options = build_parser().parse_args(argv)
    try:
        _check(options)
        if options.export:
            _export(options)
        else:
            _predict(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"plsp_train.predict: error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.batch_size is not None and options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.export is None and options.input is None:
        raise ValueError("give the INPUT to label, or --export to write the network")
    if options.export is not None:
        for name in ("input", "probabilities", "features", "device", "batch_size"):
            if getattr(options, name):
                label = "INPUT" if name == "input" else f"--{name.replace('_', '-')}"
                raise ValueError(f"{label} has no effect with --export: remove one of them")


def _predict(options: argparse.Namespace) -> None:
    from plsp_train.data.files import InputSpec, read_inputs
    from plsp_train.distributed import pick_device
    from plsp_train.model_file import BATCH_SIZE
    from plsp_train.predict.predictions import ENDINGS, Wanted, predict, write_predictions

    out = output_path(options.out, ENDINGS)
    model = _load(options, pick_device(options.device or "auto"))
    spec = InputSpec(model.input_shape, model.feature_names, progress=True)
    inputs = read_inputs(Path(options.input), spec)
    if inputs.unused:
        print(f"{options.input}: predictions do not use {', '.join(inputs.unused)}", file=sys.stderr)
    wanted = Wanted(options.probabilities, options.features)
    found = predict(model, inputs.inputs, wanted, options.batch_size or BATCH_SIZE)
    write_predictions(out, found, inputs, model.class_names)
    noun = "label" if len(found.label) == 1 else "labels"
    print(f"{len(found.label)} {noun} with a mean confidence of {found.confidence.mean():.3f} written to {out}")


def _export(options: argparse.Namespace) -> None:
    from plsp_train.predict.export import export_onnx, export_torch

    out = output_path(options.out, [_EXPORTS[options.export]])
    model = _load(options, "cpu")
    write = {"onnx": export_onnx, "torch": export_torch}[options.export]
    write(out, model)
    kind, shape = "uint8" if model.is_image else "float32", ", ".join(map(str, model.input_shape))
    print(f"network written to {out}: {kind} (N, {shape}) to logits (N, {len(model.class_names)})")


def _load(options: argparse.Namespace, device: "torch.device | str") -> "TrainedModel":
    from plsp_train.model_file import load_model

    run = Path(options.run).expanduser()
    if run.is_file() and options.selected:
        raise ValueError(f"--selected needs the directory of a run, got the file {run}")
    plugins = [name.strip() for name in options.plugin.split(",") if name.strip()]
    return load_model(run if run.is_file() else model_of(run, options.selected), plugins=plugins, device=device)
