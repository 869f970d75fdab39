"""Write the hashes of all files of every pinned version into the lock files.

    python .ci/lock_hashes.py requirements-dev.lock requirements-docs.lock

pip then installs nothing but these files. torch stands in requirements-torch.lock without hashes: its builds for CPUs,
CUDA and ROCm come from different indexes, and pip wants hashes for all requirements of a file or for none.
"""

import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

INDEX = "https://pypi.org/simple"
LINK = re.compile(r'<a [^>]*href="[^"]*#sha256=(?P<hash>[0-9a-f]{64})"[^>]*>(?P<file>[^<]+)</a>')


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes(name: str, version: str) -> list[str]:
    """Of the source archive and the wheels of this version that have not been withdrawn."""
    with urllib.request.urlopen(f"{INDEX}/{normal(name)}/", timeout=60) as answer:
        page = answer.read().decode()
    # A wheel separates its name, version and tags by hyphens, and has none inside the name.
    start = re.compile(rf"{normal(name)}-{re.escape(version)}(-|\.tar\.gz|\.zip)")
    links = (link for link in LINK.finditer(page) if "data-yanked" not in link.group())
    stem = len(name)
    found = [link["hash"] for link in links if start.match(normal(link["file"][:stem]) + link["file"][stem:])]
    if not found:
        raise SystemExit(f"{INDEX} has no file of {name} {version}")
    return sorted(found)


def locked(text: str) -> Iterator[str]:
    for line in re.sub(r" \\\n +--hash=\S+", "", text).splitlines():
        pin = re.match(r"([\w.-]+)==([^ ;]+)", line)
        lines = [] if pin is None else [f"    --hash=sha256:{found}" for found in hashes(*pin.groups())]
        yield " \\\n".join([line, *lines])


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text("\n".join(locked(path.read_text())) + "\n")
