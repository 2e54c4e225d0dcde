"""Common images."""

from __future__ import annotations

import os

# Replaces each image below if it is set, for clusters that cannot pull them.
SUBSTITUTE = "TORCHRUN_SDK_IMAGE"


def pytorch(tag: str = "26.07-py3") -> str:
    """NVIDIA's PyTorch image of this tag, https://catalog.ngc.nvidia.com."""
    return f"nvcr.io/nvidia/pytorch:{tag}"


def ray(tag: str = "2.58.0-py312") -> str:
    """Ray's image of this tag."""
    return f"rayproject/ray:{tag}"


Ray = ray


def resolve(image: str) -> str:
    """The image to run, "" for that of the queue."""
    return os.environ.get(SUBSTITUTE) or image
