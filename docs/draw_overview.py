"""Draws docs/overview.svg, the picture of the README: `make pictures`."""

from collections.abc import Iterator
from pathlib import Path

import svg

PICTURE = Path(__file__).with_name("overview.svg")
WIDTH, HEIGHT = 980, 470
RANKS = 8  # in each pod, one for each GPU


def laptop() -> list[str]:
    """What the user has: a directory and the plugin."""
    return [
        svg.rectangle(14, 14, 206, 442, "frame"),
        svg.text(117, 40, "Laptop", "strong"),
        svg.box(28, 60, 178, 66, "user", "my-project/", "train.py, configs, ..."),
        svg.arrow((117, 126), (117, 166)),
        svg.rectangle(28, 168, 178, 226, "ours"),
        svg.text(117, 192, "kubectl torchrun run", "strong"),
        svg.text(117, 226, "creates the job", "small"),
        svg.text(117, 268, "uploads changed files", "small"),
        svg.text(117, 322, "shows phases, reasons", "small"),
        svg.text(117, 340, "and the logs of all ranks,", "small"),
        svg.text(117, 358, "exits with the run", "small"),
        svg.text(117, 424, "or kubectl apply,", "small muted"),
        svg.text(117, 441, "or the Python SDK", "small muted"),
    ]


def cluster() -> list[str]:
    """What runs in the cluster, without the lines between it."""
    parts = [
        svg.rectangle(308, 14, 658, 442, "frame"),
        svg.text(637, 40, "Kubernetes cluster", "strong"),
        svg.rectangle(324, 60, 144, 334, "other"),
        svg.text(396, 86, "API server", "strong"),
        svg.box(334, 102, 124, 44, "plain", "TorchrunQueue"),
        svg.box(334, 154, 124, 44, "plain", "TorchrunJob"),
        svg.box(546, 60, 176, 84, "ours", "Torchrun Controller", "reconciles jobs", "and queues"),
        svg.box(790, 60, 162, 50, "other", "Prometheus", "dashboards, alerts"),
        svg.box(546, 228, 176, 58, "ours", "Sync pod", "verifies the code"),
        svg.volume(546, 324, 176, 72, "data", "Workspace PVC", "the code"),
        svg.rectangle(790, 168, 162, 182, "other"),
        svg.text(871, 192, "Indexed Job", "strong"),
        svg.volume(810, 386, 142, 58, "data", "Checkpoint PVC"),
        svg.arrow((881, 350), (881, 384), both=True),
    ]
    for index, y in enumerate((204, 276)):
        parts.append(pod(802, y, index))
    return parts


def pod(x: float, y: float, index: int) -> str:
    """A pod with its ranks."""
    ranks = [
        svg.rectangle(x + 10 + 15.2 * rank, y + 32, 12, 14, "plain", radius=3)
        for rank in range(RANKS)
    ]
    return "".join(
        [
            svg.rectangle(x, y, 138, 60, "user"),
            svg.text(x + 10, y + 21, f"pod {index}", "strong", anchor="start"),
            svg.text(x + 130, y + 21, "torchrun", "mono", anchor="end"),
            *ranks,
        ]
    )


def story() -> list[str]:
    """The numbered steps of a run, from the directory to the logs of all ranks."""
    return [
        svg.arrow((206, 222), (322, 222)),
        svg.number(264, 222, 1),
        svg.arrow((468, 84), (544, 84)),
        label(506, 76, "watches", anchor="middle"),
        svg.arrow((546, 120), (470, 120)),
        label(506, 137, "applies", anchor="middle"),
        svg.arrow((634, 144), (634, 226)),
        svg.number(634, 190, 2),
        label(650, 194, "creates"),
        svg.arrow((206, 264), (544, 264)),
        svg.number(264, 264, 3),
        label(396, 256, "pod proxy", anchor="middle"),
        svg.arrow((634, 286), (634, 322)),
        svg.number(634, 300, 4),
        label(650, 304, "writes"),
        svg.arrow((696, 144), (696, 180), (788, 180)),
        svg.number(744, 180, 5),
        label(744, 204, "creates", anchor="middle"),
        svg.arrow((722, 358), (756, 358), (756, 306), (788, 306)),
        svg.number(756, 332, 6),
        label(746, 302, "copy", anchor="end"),
        svg.arrow((788, 84), (724, 84)),
        label(757, 76, "scrapes", anchor="middle"),
        svg.arrow((871, 166), (871, 128), (724, 128), kind="line dashed"),
        label(864, 148, "progress", anchor="end"),
        svg.arrow((800, 350), (800, 424), (396, 424), (396, 396)),
        svg.number(600, 424, 7),
        svg.arrow((324, 336), (208, 336)),
        svg.number(264, 336, 7),
    ]


def label(x: float, y: float, content: str, anchor: svg.Anchor = "start") -> str:
    """Small text beside a line."""
    return svg.text(x, y, content, "small muted", anchor=anchor)


def picture() -> str:
    """The SVG."""
    return svg.picture(
        WIDTH,
        HEIGHT,
        "From a local directory to torchrun on several nodes",
        [*laptop(), *cluster(), *story()],
    )


def pictures() -> Iterator[tuple[Path, str]]:
    """The file and its content."""
    yield PICTURE, picture()


if __name__ == "__main__":
    svg.write(pictures())
