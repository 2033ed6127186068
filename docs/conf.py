"""Settings of Sphinx. ``python -m nox -s docs`` builds the documentation."""

from __future__ import annotations

import trioserve

project = "trioserve"
author = "The trioserve authors"
copyright = "the trioserve authors"
version = release = trioserve.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_ext", "examples"]
html_theme = "furo"
html_title = f"trioserve {release}"
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
