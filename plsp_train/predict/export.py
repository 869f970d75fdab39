"""The network of a trained model as a torch.export program or an ONNX model.

Both take raw inputs, normalise them and return logits, for any number of inputs at a time. Both carry the class names.
A file is written only after its content has reproduced the logits of the network.
"""

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plsp_train.files import write_atomically
from plsp_train.model_file import TrainedModel

EXPORTED_NAMES = "class_names"
"""The extra file of a torch.export program, and the metadata of an ONNX model, with a JSON list of the class names."""
_TOLERANCE = 1e-4  # of the largest logit: another order of summation, not another network


class _RawInputs(nn.Module):
    """The network behind its normalisation."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        # Exported weights are contiguous, whatever layout is fastest here.
        self.network = copy.deepcopy(model.network).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self._normalise = model.normalise
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(self._normalise(inputs))


def export_torch(path: Path, model: TrainedModel) -> None:
    """Write a program that torch.export.load reads."""
    buffer = io.BytesIO()
    with _one_line_errors():
        program = torch.export.export(_RawInputs(model), (_examples(model, 2),), dynamic_shapes=_any_number())
        torch.export.save(program, buffer, extra_files={EXPORTED_NAMES: json.dumps(model.class_names)})
    buffer.seek(0)
    _verify(torch.export.load(buffer).module(), model)
    write_atomically(path, buffer.getvalue())


def export_onnx(path: Path, model: TrainedModel) -> None:
    """Write an ONNX model with the input `inputs` and the output `logits`."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401, what torch.onnx exports with
    except ModuleNotFoundError as error:
        message = f"--export onnx needs {error.name}, which is not installed: pip install onnx onnxscript onnxruntime"
        raise ImportError(message) from None
    with _one_line_errors():
        program: Any = torch.onnx.export(
            _RawInputs(model),
            (_examples(model, 2),),
            input_names=["inputs"],
            output_names=["logits"],
            dynamic_shapes=_any_number(),
            dynamo=True,
            verbose=False,
        )
    program.model.metadata_props[EXPORTED_NAMES] = json.dumps(model.class_names)
    content = program.model_proto.SerializeToString()
    session: Any = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    _verify(lambda inputs: torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0]), model)
    write_atomically(path, content)


def _any_number() -> tuple[dict[int, Any]]:
    """The first axis of the inputs is not fixed."""
    return ({0: torch.export.Dim("batch")},)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn whatever keeps torch from exporting a network into one line. What torch itself prints is left out."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"torch cannot export this network: {reason.strip()}") from error
    finally:
        logging.disable(logging.NOTSET)


def _examples(model: TrainedModel, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (count, *model.input_shape)
    if model.is_image:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator)


def _verify(exported: Callable[[Tensor], Tensor], model: TrainedModel) -> None:
    for count in (1, 2, 5):  # not only the number that it was exported with
        inputs = _examples(model, count)
        expected = model.logits(inputs)
        scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)  # a new classifier may be all zeros
        difference = (exported(inputs).detach() - expected).abs().max() / scale
        if not difference <= _TOLERANCE:
            raise ValueError(f"the exported network differs from the trained one by {difference:.2g} of its logits")
