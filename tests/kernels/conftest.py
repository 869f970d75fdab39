from collections.abc import Iterator

import pytest
from triton_cases import poisoned

from cases import FORMS, closed_form


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for each form of the loss."""
    with closed_form(request.param):
        yield request.param


@pytest.fixture(params=("reference", *FORMS))
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """Value of `impl`: the reference, and "auto" with each form it may choose on a CPU."""
    if request.param == "reference":
        yield "reference"
    else:
        with closed_form(request.param):
            yield "auto"


@pytest.fixture
def poisoned_allocations() -> Iterator[None]:
    """Memory that a kernel has not written is poison; the margins around every allocation must stay poison."""
    with poisoned():
        yield
