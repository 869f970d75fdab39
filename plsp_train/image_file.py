"""One image file as an array. Imports no PyTorch, so that worker processes that decode images start quickly."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

# Decoding at this multiple of the wanted size loses nothing that is visible after resizing.
_REDUCED_DECODING = 2


class Header(NamedTuple):
    """What is known of an image before it is decoded."""

    width: int
    height: int
    is_grey: bool
    is_transparent: bool


def read_header(path: Path) -> Header:
    with _opened(path) as image:
        return Header(image.width, image.height, image.mode in ("1", "L", "LA"), _is_transparent(image))


def decode(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """Pixels (C, H, W) of an image, upright, on white, resized without regard to the aspect ratio."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    with _opened(path) as opened:
        opened.draft(None, (_REDUCED_DECODING * width, _REDUCED_DECODING * height))  # has an effect on JPEG alone
        image = ImageOps.exif_transpose(opened)
        if _is_transparent(image):
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, dtype=np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


@contextmanager
def _opened(path: Path) -> Iterator["Image.Image"]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading {path} needs Pillow: pip install pillow") from error
    try:
        with Image.open(path) as image:
            if image.mode == "F" or image.mode.startswith("I"):
                raise ValueError(f"it has more than 8 bits per channel (mode {image.mode}): convert it to 8 bits")
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is not a readable image: {error}") from error


def _is_transparent(image: "Image.Image") -> bool:
    return "A" in image.getbands() or "transparency" in image.info
