"""The pictures are those that their scripts draw, and can be read in both colour themes."""

import importlib
import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import svg

from pages import ROOT, pages

DOCS = ROOT / "docs"
SCRIPTS = sorted(path.stem for path in DOCS.glob("draw_*.py"))
DRAWN = {path: text for name in SCRIPTS for path, text in importlib.import_module(name).pictures()}
IMAGE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+\.svg)\)")
PLACE = re.compile(r"/(?:root|home|tmp|work|Users)/|localhost:\d|\d+\.\d+\.\d+\.\d+")


@pytest.mark.parametrize("picture", DRAWN, ids=lambda path: path.name)
def test_a_picture_is_what_its_script_draws(picture: Path):
    assert picture.read_text(encoding="utf-8") == DRAWN[picture], "run make generate"


@pytest.mark.parametrize("picture", DRAWN, ids=lambda path: path.name)
def test_a_picture_needs_nothing_from_elsewhere(picture: Path):
    text = picture.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert text.count("http") == 1, "the namespace"
    assert not re.search(r"<script|<image|@import|url\((?!#)", text)
    assert not PLACE.search(text)


@pytest.mark.parametrize("picture", DRAWN, ids=lambda path: path.name)
def test_a_picture_is_on_a_page_and_described(picture: Path):
    texts = [
        alt
        for page in pages()
        for alt, target in IMAGE.findall(page.read_text(encoding="utf-8"))
        if (page.parent / target).resolve() == picture
    ]
    assert texts, f"no page shows {picture.name}"
    assert all(len(alt.split()) >= 5 for alt in texts), texts


TEXTS = ("text", ".muted")
SURFACES = (".page", ".frame", ".ours", ".other", ".user", ".data", ".plain")


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "surface"), list(product(TEXTS, SURFACES)))
def test_text_is_readable_on_every_surface(text: str, surface: str, theme: int):
    """By level AA of WCAG 2: a contrast of 4.5 to 1."""
    colours = sorted(map(luminance, (fill(text, theme), fill(surface, theme))))
    assert (colours[1] + 0.05) / (colours[0] + 0.05) >= 4.5


def fill(selector: str, theme: int) -> str:
    declared = re.search(r"fill:#(\w{6})", svg.COLOURS[selector][theme])
    assert declared
    return declared[1]


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
