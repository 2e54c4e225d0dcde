"""Sphinx settings of the site: `make docs`.

The source folder is the checkout, so that a link between pages is the same on the site, in an
editor and on a Git server.
"""

import re
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

project = "Torchrun Controller"
version = release = version_of("torchrun-controller")
copyright = "the authors; Apache License 2.0"

extensions = ["myst_parser", "sphinx_copybutton", "sphinx_design"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**.md",
    "examples/**.md",
    "cluster/*.md",
    "sdk/*.md",
]
exclude_patterns = [".*", "build", "tests", "node_modules"]

# Anchors are those of Git servers, so links work in both places.
myst_heading_anchors = 4
# Notes are those of Git servers; the cards of the first page are of the site only.
myst_enable_extensions = ["alert", "colon_fence"]
# A console block is copied without prompts and output.
copybutton_prompt_text = "$ "

nitpicky = True
html_theme = "furo"
html_title = project
html_logo = html_favicon = "site/logo.svg"
html_extra_path = ["site/index.html", "site/llms.txt"]
html_static_path = ["site/theme.css"]
html_css_files = ["theme.css"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False

REASONS = "docs/troubleshooting"
REASON = re.compile(r"[A-Z][a-z]+(?:[A-Z][A-Za-z]*)*|OOMKilled")
# What people search for, and the reason that answers it.
SYNONYMS = {
    "NCCL timeout": "Hung",
    "watchdog": "Hung",
    "out of memory": "OOMKilled",
    "CUDA out of memory": "Exception",
    "SIGKILL": "Signaled",
    "ImagePullBackOff": "ImagePullFailed",
    "ErrImagePull": "ImagePullFailed",
    "Insufficient nvidia.com/gpu": "Unschedulable",
}


def mark_reasons(app: Sphinx, doctree: nodes.document) -> None:
    """Give each reason an anchor `reason-NAME`, and a search for its name that result first."""
    if app.env.docname != REASONS:
        return
    places: dict[str, nodes.Element] = {}
    for section in doctree.findall(nodes.section):
        title = section[0].astext()
        if REASON.fullmatch(title):
            places.setdefault(title, section)
    for row in doctree.findall(nodes.row):
        for word in row[0].astext().split(", "):
            if REASON.fullmatch(word):
                places.setdefault(word, row[0])
    for word, place in places.items():
        place["ids"].append(anchor(word))
    if missing := {*SYNONYMS.values()} - {*places}:
        raise ValueError(f"{REASONS} does not explain {missing}")
    words = {**{word: word for word in places}, **SYNONYMS}
    entries = [("single", name, anchor(word), "main", None) for name, word in words.items()]
    doctree.insert(0, addnodes.index(entries=entries))


def anchor(reason: str) -> str:
    """The anchor of a reason: commands and events link to it."""
    return f"reason-{reason.lower()}"


def write_map_for_models(app: Sphinx, error: Exception | None) -> None:
    """Add every page with its first sentence to llms.txt."""
    if error is not None or app.builder.name != "html":
        return
    lines = []
    for name in sorted(app.env.all_docs):
        path = app.env.doc2path(name)
        _, _, text = Path(path).read_text(encoding="utf-8").partition("\n")
        first = re.match(r"\s*([^\n#<`:|!].*?[.:])(?:\s|$)", text, re.DOTALL)
        summary = " ".join(first[1].split()).rstrip(":") if first else ""
        summary = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", summary)
        title = app.env.titles[name].astext()
        lines.append(f"- [{title}]({name}.html)" + (f": {summary}" if summary else ""))
    with (Path(app.outdir) / "llms.txt").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def setup(app: Sphinx) -> None:
    """Register what no extension does."""
    app.connect("doctree-read", mark_reasons)
    app.connect("build-finished", write_map_for_models)
