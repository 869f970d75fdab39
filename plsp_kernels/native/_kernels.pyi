VERSIONS: tuple[str, ...]

def upper_bound(
    version: int,
    sizes: tuple[int, int, int, int],
    inputs: tuple[int, ...],
    numbers: tuple[float, float, float, float, float, float],
    flags: tuple[bool, bool],
    outputs: tuple[int, ...],
    /,
) -> None: ...
def covariance_update(
    version: int, sizes: tuple[int, int, int], arrays: tuple[int, ...], diagonal: bool, /
) -> None: ...
def cross_entropy(
    version: int,
    sizes: tuple[int, int, int],
    arrays: tuple[int, ...],
    numbers: tuple[float, float],
    diagonal: bool,
    /,
) -> None: ...
def class_activation_labels(count: int, num_classes: int, logits: int, candidates: int, labels: int, /) -> None: ...
