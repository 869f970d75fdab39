"""Sphinx configuration: `make docs` builds the site strictly, every warning is an error."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from sphinx.util import logging  # noqa: E402

from plsp_kernels import __version__  # noqa: E402

project = "PLSP"
author = "The PLSP developers"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

# GitHub renders the same files: dollar mathematics, and headings with the same anchors.
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# Docstrings use single backticks for code, as Markdown does.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 100
napoleon_use_rtype = False

# Pygments does not know CSV.
suppress_warnings = ["misc.highlighting_failure"]

nitpicky = True
# The build works offline, so names of other projects are not looked up. Our own must resolve.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|numpy|np|typing|collections|pathlib)\..*"),
    (r"py:.*", r"plsp_train\.models\.base\.Network"),
    (r"py:.*", r"(Tensor|Module|ProcessGroup|Callable|Sequence|Path|RandomState|Results)"),
    (r"py:.*", r"(optional|array-like|array|ndarray|callable|scalar|sequence)"),
    # Types in numpydoc sections that are shapes and choices, not names: "shape (N, l)", "{'full', 'diagonal'}".
    (r"py:class", r".*[^\w.].*"),
    (r"py:class", r"(shape|default|of|or|int64|uint8|bool|number|0-d|tensor|length|Bl|Bu|N|U|l|d|n|h|w|c)"),
]

html_theme = "pydata_sphinx_theme"
html_title = f"PLSP {release}"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
}
html_show_sourcelink = False
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
linkcheck_ignore = [r"https?://localhost"]


def _check_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A public name without a docstring fails the build; |z - 1| is an absolute value, not a substitution."""
    if not any(line.strip() for line in lines):
        logging.getLogger(__name__).warning("%s has no docstring", name)
    lines[:] = [line if "``" in line else line.replace("|", r"\|") for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _check_docstring)
