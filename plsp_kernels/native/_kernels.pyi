VERSIONS: tuple[str, ...]

def upper_bound(
    version: int,
    sizes: tuple[int, ...],
    inputs: tuple[int, ...],
    numbers: tuple[float, float, float],
    argmax_in_candidates: bool,
    outputs: tuple[int, ...],
    /,
) -> None: ...
