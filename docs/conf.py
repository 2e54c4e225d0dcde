"""Sphinx settings of the site: `make docs`.

The source folder is the checkout, so that a link between pages is the same on the site, in an
editor and on a Git server.
"""

from importlib.metadata import version as version_of

project = "Torchrun Controller"
version = release = version_of("torchrun-controller")
copyright = "the authors; Apache License 2.0"

extensions = ["myst_parser"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = [
    "*.md",
    "docs/**.md",
    "examples/**.md",
    "cluster/*.md",
    "plugin/*.md",
    "sdk/*.md",
]
exclude_patterns = [".*", "build", "tests", "node_modules"]

# Anchors are those of Git servers; what is no link there is none here.
myst_heading_anchors = 4

nitpicky = True
html_theme = "furo"
html_title = f"Torchrun Controller {release}"
html_extra_path = ["site/index.html"]
html_static_path = ["site/theme.css"]
html_css_files = ["theme.css"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
