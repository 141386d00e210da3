"""Sphinx settings: MyST pages, docstrings, examples run, MathJax shipped with the pages."""

import re
import tomllib
from pathlib import Path

from docutils import nodes

import torchweft

project = "torchweft"
author = "The torchweft authors"
copyright = "2026, The torchweft authors"
release = torchweft.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
]
exclude_patterns = [
    "_build",
    "templates",
    "auto_tutorials/index.rst",
    "tutorials/GALLERY_HEADER.rst",
]
templates_path = ["templates"]
html_theme = "furo"
html_title = "torchweft"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
default_role = "code"  # a single backtick in a docstring is code
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Pages link to their sources where pyproject.toml names the repository.
_SETTINGS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
if _REPOSITORY := _SETTINGS["project"].get("urls", {}).get("Repository"):
    html_theme_options = {
        "source_repository": _REPOSITORY,
        "source_branch": "main",
        "source_directory": "docs/",
    }

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3

# Reference pages show each public name at the path that users import it from.
autosummary_generate = True
napoleon_use_ivar = True  # properties have entries of their own
napoleon_use_rtype = False  # "Returns:" begins with a shape, not with a type
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

sphinx_gallery_conf = {
    "examples_dirs": ["../examples", "tutorials"],
    "gallery_dirs": ["auto_examples", "auto_tutorials"],
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


_SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")


def _plain(lines):
    """Docstring lines as reStructuredText: signs escaped, code and set-off blocks as they stand."""
    text = [_MARKUP.sub(lambda m: m[1] or "\\" + m[2], line) for line in lines]
    shown = []
    in_block = in_example = in_section = False
    for number, (raw, line) in enumerate(zip(lines, text, strict=True)):
        indented, first = raw.startswith("    "), raw.lstrip()
        in_example = bool(first) and (in_example or first.startswith(">>>"))
        if first and not indented:
            in_block, in_section = False, raw in _SECTIONS
        apart = indented and (number == 0 or not lines[number - 1].strip())
        if apart and not (in_block or in_section or in_example):
            shown += ["::", ""]
            in_block = True
        shown.append(raw if in_block or in_example else line)
    return shown


def _process_docstring(app, what, name, obj, options, lines):
    """An attribute's first line is text: Napoleon takes what stands before a colon for a type."""
    lines[:] = _plain(lines)
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")


def _skip_member(app, what, name, obj, skip, options):
    """Fields of a NamedTuple stand in its signature; "alias for field number 0" says nothing."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def _shorten_sidebar(app, pagename, templatename, context, doctree):
    """Pages of single names are left out of the sidebar: their family's page lists them."""
    if whole := context.get("toctree"):
        context["toctree"] = lambda **options: whole(**{**options, "maxdepth": 2})


def _trim_code(app, doctree):
    """Examples end with an empty line, which doctest needs and readers do not."""
    for block in doctree.findall(nodes.literal_block):
        if block.rawsource == block.astext():  # no markup inside
            block.rawsource = block.rawsource.rstrip("\n")
            block[:] = [nodes.Text(block.rawsource)]


def setup(app):
    """Our docstring handler runs before Napoleon's, which then finds the sections."""
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
    app.connect("doctree-read", _trim_code)
    app.connect("html-page-context", _shorten_sidebar, priority=400)  # furo reads it
    app.connect("autodoc-skip-member", _skip_member)
