"""Sphinx settings: MyST pages, docstrings, examples run, MathJax shipped with the pages."""

import re

import torchweft

project = "torchweft"
author = "The torchweft authors"
copyright = "2026, The torchweft authors"
release = torchweft.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torchweft"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
default_role = "code"  # a single backtick in a docstring is code

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "subsection_order": [
        f"../examples/{family}"
        for family in ("products", "o3", "clifford", "reductions", "voxels", "distributed")
    ],
    "filename_pattern": r"plot_",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "min_reported_time": 1,
    "plot_gallery": True,
}

# A word that ends in "_" and signs such as | and * mean themselves in our docstrings; only `code`,
# an *emphasised* word and the sections of the Google style are markup.
_MARKUP = re.compile(r"(`[^`]*`|(?<!\S)\*\w+\*)|([|*\\]|(?<=\w)_(?!\w))")


def _plain(lines):
    """Docstring lines as reStructuredText: signs escaped, set-off blocks shown as they stand."""
    text = [_MARKUP.sub(lambda m: m[1] or "\\" + m[2], line) for line in lines]
    shown = []
    in_block = False
    for number, (raw, line) in enumerate(zip(lines, text, strict=True)):
        begins = raw.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        if begins and not in_block:
            shown += ["::", ""]
            in_block = True
        elif in_block and raw.strip() and not raw.startswith("    "):
            in_block = False
        shown.append(raw if in_block else line)
    return shown


def _process_docstring(app, what, name, obj, options, lines):
    lines[:] = _plain(lines)


def _skip_member(app, what, name, obj, skip, options):
    """Fields of a NamedTuple stand in its signature; "alias for field number 0" says nothing."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    """Our docstring handler runs before Napoleon's, which then finds the sections."""
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
    app.connect("autodoc-skip-member", _skip_member)
