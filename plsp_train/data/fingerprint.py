"""Tells data that have changed since a checkpoint was written."""

import hashlib

from torch import Tensor

from plsp_train.data.candidate_sets import AnyCandidates, CandidateSets
from plsp_train.data.mapped import Inputs

_CHUNK, _IMAGES = 256, 4096


def fingerprint(inputs: Inputs, candidates: AnyCandidates) -> str:
    """A digest of inputs and candidate sets. Of images in a file, a sample is looked at."""
    digest = hashlib.blake2b(digest_size=16)
    looked_at = inputs if isinstance(inputs, Tensor) else inputs.sample(_IMAGES)
    sets = CandidateSets.pack(candidates)
    for shape, parts in ((inputs.shape, looked_at.split(_CHUNK)), (sets.shape, [sets.bytes_of_rows()])):
        digest.update(repr(tuple(shape)).encode())
        for part in parts:
            digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()
