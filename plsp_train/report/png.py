"""Small PNG images as data URIs, without an imaging library."""

import base64
import struct
import zlib

import numpy as np

_LARGEST_SIDE = 96  # thumbnails are shown at about this size
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # channels: grey, RGB, RGBA


def thumbnail(picture: np.ndarray) -> np.ndarray:
    """uint8 (C, H, W) to (H', W', 1 or 3): averaged over blocks if large; other numbers of channels become grey."""
    pixels = np.moveaxis(picture, 0, -1)
    if pixels.shape[2] not in (1, 3):
        pixels = pixels.mean(2, keepdims=True)
    height, width, channels = pixels.shape
    block = -(-max(height, width) // _LARGEST_SIDE)
    if block > 1 and min(height, width) >= block:
        rows, columns = height // block, width // block
        blocks = pixels[: rows * block, : columns * block].reshape(rows, block, columns, block, channels)
        pixels = blocks.mean((1, 3))
    return pixels.round().astype(np.uint8)


def data_uri(pixels: np.ndarray) -> str:
    """A PNG image of uint8 pixels (H, W, channels)."""
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter, 0 for none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
