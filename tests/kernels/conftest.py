from collections.abc import Iterator

import pytest

from cases import FORMS, closed_form


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once for each form that computes the loss."""
    with closed_form(request.param):
        yield request.param


@pytest.fixture(params=("reference", *FORMS))
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """An argument `impl`: the test runs for the reference and for each form of the closed form."""
    if request.param == "reference":
        yield "reference"
    else:
        with closed_form(request.param):
            yield "torch"
