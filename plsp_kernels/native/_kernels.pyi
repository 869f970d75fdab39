VERSIONS: tuple[str, ...]

def upper_bound(
    version: int,
    sizes: tuple[int, int, int, int],
    inputs: tuple[int, ...],
    numbers: tuple[float, float, float],
    diagonal: bool,
    argmax_in_candidates: bool,
    outputs: tuple[int, ...],
    /,
) -> None: ...
def covariance_update(
    version: int, sizes: tuple[int, int, int], tensors: tuple[int, ...], diagonal: bool, /
) -> None: ...
def class_activation_labels(count: int, num_classes: int, logits: int, candidates: int, labels: int, /) -> None: ...
