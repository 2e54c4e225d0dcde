"""Parts of the messages that users read: sentences, counts and lists of names."""

from collections.abc import Iterable


def sentence(text: str) -> str:
    """Return the text in one line with a full stop. Other programs may write several, or none."""
    text = " ".join(line.strip() for line in text.strip().splitlines())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def count_of(number: int | str, noun: str) -> str:
    """Return a number with its noun: "1 pod", "2 pods", "1500m CPUs"."""
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"


def pods_are(number: int, total: int) -> str:
    """Return a share of the pods with its verb: "0 of 2 pods are", "1 of 2 pods is"."""
    return f"{number} of {count_of(total, 'pod')} {'is' if 1 in (number, total) else 'are'}"


def list_names(names: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """Return the first `most` names in order, and the number of the others: "a, b and 3 more"."""
    sorted_names = sorted(names)
    other_count = len(sorted_names) - most
    return separator.join(sorted_names[:most]) + (
        f" and {other_count} more" if other_count > 0 else ""
    )
