"""The examples in the docstrings of the public names run and print what they show."""

import doctest
import inspect

import pytest

import plsp_kernels

PUBLIC = [name for name in plsp_kernels.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", PUBLIC)
def test_example_prints_what_it_shows(name, capsys):
    public = getattr(plsp_kernels, name)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(public), {}, name, inspect.getsourcefile(public), 0)
    assert example.examples, f"plsp_kernels.{name} has no example"
    result = doctest.DocTestRunner().run(example)
    assert result.failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "SemanticLoss"])
def test_every_parameter_is_documented(name):
    public = getattr(plsp_kernels, name)
    lines = inspect.getdoc(public).splitlines()
    documented = [line.split(" : ")[0] for line in lines[lines.index("Parameters") : lines.index("Examples")]]
    assert [parameter for parameter in inspect.signature(public).parameters if parameter not in documented] == []
