"""What each parser of a setting accepts, and the value that it returns."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchrun_controller.setting_parsers import (
    IMAGE,
    NAME,
    SUBDOMAIN,
    base_url,
    boolean,
    existing_file,
    integer,
    ip_address,
    matching,
    name_list,
    one_of,
    seconds,
)

Parser = Callable[[str], object]

name, subdomain, image = matching(NAME), matching(SUBDOMAIN), matching(IMAGE)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (name, "a", "a"),
        (name, "a-1" + "b" * 60, "a-1" + "b" * 60),
        (subdomain, "a.b-c.d", "a.b-c.d"),
        (subdomain, "a" * 253, "a" * 253),
        (image, "runtime", "runtime"),
        (image, "localhost:5000/a/b_c:1.0", "localhost:5000/a/b_c:1.0"),
        (image, f"a@sha256:{'0' * 64}", f"a@sha256:{'0' * 64}"),
        (one_of("json", "auto"), "auto", "auto"),
        (name_list, "", ()),
        (name_list, " b, a,,b ", ("b", "a")),
        (integer(0, 10), "0", 0),
        (integer(0, 10), "10", 10),
        (boolean, "TRUE", True),
        (boolean, "false", False),
        (seconds, "15s", 15.0),
        (seconds, "500ms", 0.5),
        (seconds, "1.5m", 90.0),
        (seconds, "2h", 7200.0),
        (seconds, "7", 7.0),
        (existing_file, "", None),
        (ip_address, "", ""),
        (ip_address, "127.0.0.1", "127.0.0.1"),
        (ip_address, "::1", "::1"),
        (base_url, "", ""),
        (base_url, "https://a.b:8081/c//", "https://a.b:8081/c"),
    ],
)
def test_accepted(parse: Parser, text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (name, ""),
        (name, "A"),
        (name, "-a"),
        (name, "a."),
        (name, "a" * 64),
        (subdomain, "a..b"),
        (subdomain, "a" * 254),
        (image, "Upper"),
        (image, "a b"),
        (image, "a:"),
        (image, "a@sha256:0"),
        (one_of("json", "auto"), "jsonauto"),
        (one_of("json", "auto"), ""),
        (name_list, "a,B"),
        (integer(1, 10), "0"),
        (integer(1, 10), "11"),
        (integer(1, 10), "1.5"),
        (integer(1, 10), "+1"),
        (integer(1, 10), "٣"),
        (integer(1, 10), ""),
        (seconds, ""),
        (seconds, "-1s"),
        (seconds, "1 s"),
        (seconds, "1d"),
        (existing_file, "/does/not/exist"),
        (ip_address, "localhost"),
        (ip_address, "127.0.0.1:80"),
        (base_url, "ftp://a"),
        (base_url, "a:8081"),
        (base_url, "http://"),
        (base_url, "http://a:0"),
        (base_url, "http://a:99999"),
        (base_url, "http://a?b=c"),
        (base_url, "http://a#b"),
        (base_url, "http://user@a"),
        (base_url, "http://:secret@a"),
    ],
)
def test_refused(parse: Parser, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the parsers have no messages
        parse(text)


@pytest.mark.parametrize("text", ["", "1", "yes", "true "])
def test_a_boolean_that_is_neither(text: str) -> None:
    with pytest.raises(KeyError):
        boolean(text)


def test_an_existing_file_is_its_path_but_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.touch()
    assert existing_file(str(file)) == str(file)
    with pytest.raises(ValueError):  # noqa: PT011
        existing_file(str(tmp_path))
