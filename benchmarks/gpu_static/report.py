"""Tables of docs/gpu-static.md and the two CSV files behind them."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.gpu_static import compilation, roofline
from benchmarks.gpu_static.calls import LOSS, STATE_UPDATES
from benchmarks.gpu_static.instructions import CLASSES
from benchmarks.gpu_static.occupancy import LIMITS
from benchmarks.gpu_static.roofline import GPUS
from plsp_train.files import write_atomically

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "gpu-static.md"
COMPILED_CSV = ROOT / "benchmarks" / "results" / "gpu_static.csv"
ROOFLINE_CSV = ROOT / "benchmarks" / "results" / "gpu_static_roofline.csv"
PRESETS = ("fmnist", "cifar10", "cifar100")
"""Shapes at which register spills in float32 are failures."""

Row = dict[str, str]


def failures(compiled: Iterable[Row]) -> list[str]:
    """Kernels that spill in float32 at the shape of a preset, or do not compile."""
    found = []
    for row in compiled:
        where = f"{row['kernel']} on {row['target']} ({row['shapes']}; {row['dtypes']})"
        preset = "float32" in row["dtypes"].split() and any(shape in PRESETS for shape in row["shapes"].split())
        if row["note"]:
            found.append(f"{where} {row['note']}")
        elif preset and int(row["spill bytes"]):
            found.append(f"{where} spills {row['spill bytes']} bytes of registers")
    return found


def resources(compiled: Sequence[Row], dtype: str = "float32") -> str:
    """Registers, shared bytes and resident blocks of each kernel, one column per target.

    If several functions have binaries of their own, the first one counts: that of the loss. Tile and warps are those
    of the first target.
    """
    rows = [row for row in compiled if dtype in row["dtypes"].split()]
    targets = list(dict.fromkeys(row["target"] for row in rows))
    shapes: dict[tuple[str, ...], list[str]] = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        used = [row for row in rows if row["kernel"] == kernel]
        for shape in dict.fromkeys(shape for row in used for shape in row["shapes"].split()):
            here: dict[str, Row] = {}
            for row in used:
                if shape in row["shapes"].split():
                    here.setdefault(row["target"], row)
            first = next(iter(here.values()))
            cells = [_resource_cell(here[target]) if target in here else "" for target in targets]
            shapes.setdefault((kernel, first["tile"], first["warps"], *cells), []).append(shape)
    body = [[kernel, " ".join(names), *cells] for (kernel, *cells), names in shapes.items()]
    return _table(["kernel", "shapes", "tile", "warps", *targets], body, left=3)


def _resource_cell(row: Row) -> str:
    if row["note"]:
        return row["note"]
    cell = f"{row['registers']} · {row['shared bytes']} · {row['resident blocks (computed)']}"
    return cell + (f" · **{row['spill bytes']} spilled**" if int(row["spill bytes"]) else "")


def spills(compiled: Iterable[Row]) -> str:
    """Every binary with spilled registers."""
    columns = ("target", "kernel", "shapes", "dtypes", "tile", "registers", "spill bytes")
    body = [[row[name] for name in columns] for row in compiled if row["spill bytes"] not in ("", "0")]
    return _table(columns, body, left=5) if body else "None."


def instructions(compiled: Iterable[Row]) -> str:
    """Static counts at the cifar100 shape in float32."""
    body = [
        [row["target"], row["kernel"], *(row[name] for name in CLASSES)]
        for row in compiled
        if "cifar100" in row["shapes"].split()
        and "float32" in row["dtypes"].split()
        and row["target"] in ("sm_80", "sm_90", "gfx942")
    ]
    return _table(["target", "kernel", *CLASSES], body, left=2)


def totals(rows: Sequence[Row], dtype: str = "float32") -> str:
    """Each function, forward and backward: the kernels compared with the eager reference."""
    body = []
    for function, shape in dict.fromkeys((row["function"], row["shape"]) for row in rows):
        body.append([function, shape, *_pair_of_totals(rows, function, shape, dtype)])
    return _table(["function", "shape", *_TOTALS_HEADER], body, left=2)


def dtypes(rows: Sequence[Row], shape: str = "cifar100") -> str:
    """The loss in each dtype."""
    names = dict.fromkeys(row["dtype"] for row in rows)
    body = [[dtype, *_pair_of_totals(rows, LOSS, shape, dtype)] for dtype in names]
    return _table(["dtype", *_TOTALS_HEADER], body)


_TOTALS_HEADER = ["launches", "MB", "Gop", *(f"{gpu} µs (computed)" for gpu in GPUS)]


def _pair_of_totals(rows: Iterable[Row], function: str, shape: str, dtype: str) -> list[str]:
    """Format cells as "kernels / reference"."""
    here = [row for row in rows if (row["function"], row["shape"], row["dtype"]) == (function, shape, dtype)]
    columns = [_totals([row for row in here if row["implementation"] == impl]) for impl in ("triton", "reference")]
    return [f"{kernels} / {reference}" for kernels, reference in zip(*columns, strict=True)]


def _totals(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["–"] * len(_TOTALS_HEADER)

    def total(*columns: str) -> float:
        return sum(float(row[column]) for row in rows for column in columns)

    largest = max(float(row["largest tensor bytes"]) for row in rows)
    times = [
        _figure(total(f"{name} µs (computed)")) if largest <= gpu.memory else "does not fit"
        for name, gpu in GPUS.items()
    ]
    operations = total("matrix operations", "other operations") / 1e9
    return [f"{total('launches'):.0f}", _figure(total("bytes") / 1e6), _figure(operations), *times]


BEFORE = {
    "fmnist": (32, 41, 90, 100),
    "cifar10": (32, 41, 90, 100),
    "cifar100": (40, 49, 105, 115),
    "large": (41, 50, 106, 116),
    "large-diagonal": (40, 49, 105, 115),
}
"""Launches at revision e24f860, by the same count: loss in float32 and bfloat16, step in float32 and bfloat16."""


def launches(rows: Sequence[Row]) -> str:
    """Launches of the loss and of a step with its state updates, before and after they were fused."""
    body = []
    for shape, before in BEFORE.items():
        now = [
            str(sum(_launches(rows, function, shape, dtype) for function in functions))
            for functions in ((LOSS,), (LOSS, *STATE_UPDATES))
            for dtype in ("float32", "bfloat16")
        ]
        body.append([shape, *(f"{old} → {new}" for old, new in zip(before, now, strict=True))])
    header = [f"{what}, {dtype}" for what in ("loss", "step") for dtype in ("float32", "bfloat16")]
    return _table(["shape", *header], body)


def _launches(rows: Sequence[Row], function: str, shape: str, dtype: str) -> int:
    wanted = function, shape, dtype, "triton"
    names = "function", "shape", "dtype", "implementation"
    return sum(int(row["launches"]) for row in rows if tuple(row[name] for name in names) == wanted)


def kernels(rows: Iterable[Row], shape: str = "cifar100") -> str:
    """A step with its state updates at one shape in float32: each Triton kernel, and all ATen kernels together."""
    times = [f"{gpu} µs (computed)" for gpu in GPUS]
    columns = ["launches", "bytes", "matrix operations", "other operations", *times]
    chosen: dict[str, list[float]] = {}
    for row in rows:
        wanted = row["shape"], row["dtype"], row["implementation"]
        if row["function"] in (LOSS, *STATE_UPDATES) and wanted == (shape, "float32", "triton"):
            name = "ATen, all together" if row["kernel"].startswith("aten::") else row["kernel"]
            sums = chosen.setdefault(name, [0.0] * len(columns))
            chosen[name] = [total + float(row[column]) for total, column in zip(sums, columns, strict=True)]
    body = [
        [name, *(f"{value:,.0f}" for value in values[:4]), *map(_figure, values[4:])] for name, values in chosen.items()
    ]
    return _table(["kernel", *columns], body)


def limits() -> str:
    """Limits of each target that determine the resident blocks."""
    body = []
    for target, row in LIMITS.items():
        registers, unit = row.registers_per_partition // row.warp_size, row.register_unit // row.warp_size
        numbers = row.warps, row.warp_size, row.blocks, registers, unit, row.shared_bytes, row.shared_reserved
        body.append([target, *map(str, numbers), row.source])
    header = ["target", "warps", "threads per warp", "blocks", "registers per lane and partition", "in units of"]
    return _table([*header, "shared bytes", "reserved per block", "source"], body)


def gpus() -> str:
    """Vendor specifications."""
    body = []
    for name, gpu in GPUS.items():
        sizes = [f"{value / 1e9:g}" for value in (gpu.memory, gpu.bandwidth)]
        peaks = gpu.float32, gpu.float32_matrix, gpu.tf32_matrix, gpu.float64, gpu.float64_matrix
        body.append([name, gpu.target, *sizes, *(f"{peak / 1e12:g}" if peak else "–" for peak in peaks), gpu.source])
    header = ["GPU", "target", "GB", "GB/s", "float32", "float32 matrix", "TF32 matrix", "float64", "float64 matrix"]
    return _table([*header, "source"], body, left=2)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(header: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> str:
    """Markdown table; the first `left` columns are text, the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *body))


def document(text: str, compiled: Sequence[Row], counted: Sequence[Row]) -> str:
    """Regenerate every table of the document; each stands between two comments with its name."""
    tables: dict[str, Callable[[], str]] = {
        "limits": limits,
        "gpus": gpus,
        "resources": lambda: resources(compiled),
        "spills": lambda: spills(compiled),
        "instructions": lambda: instructions(compiled),
        "launches": lambda: launches(counted),
        "totals": lambda: totals(counted),
        "dtypes": lambda: dtypes(counted),
        "kernels": lambda: kernels(counted),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n" + table() + "\n" + end + rest.split(end)[1]
    return text


def write(compiled: Sequence[Row], counted: Sequence[Row]) -> None:
    """Write both CSV files and the document."""
    write_atomically(COMPILED_CSV, _csv(compilation.COLUMNS, compiled))
    write_atomically(ROOFLINE_CSV, _csv(roofline.COLUMNS, counted))
    text = DOCUMENT.read_text(encoding="utf-8")
    write_atomically(DOCUMENT, document(text, compiled, counted).encode())


def _csv(columns: Sequence[str], rows: Iterable[Row]) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()
