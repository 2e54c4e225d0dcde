"""A package that pip installs without network and build."""

import zipfile
from pathlib import Path

WHEEL = "greeting-1.0-py3-none-any.whl"
_INFO = "greeting-1.0.dist-info"
_FILES = {
    "greeting.py": "def main():\n    print('hello', flush=True)\n",
    f"{_INFO}/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
    f"{_INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{_INFO}/entry_points.txt": "[console_scripts]\ngreeting = greeting:main\n",
    f"{_INFO}/RECORD": "",
}


def add_wheel(directory: Path) -> None:
    """Put the wheel of `greeting`, a module and a program, into the directory."""
    with zipfile.ZipFile(directory / WHEEL, "w") as archive:
        for name, text in _FILES.items():
            archive.writestr(name, text)
