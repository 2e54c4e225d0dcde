"""URLs, refs and folders that must be refused before any request, by class."""

import random
from collections.abc import Callable

FINE = "https://git.example/acme/train.git"
# Every spelling of 169.254.169.254 that a resolver accepts, and other addresses that serve
# credentials or are private.
FORBIDDEN = (
    "169.254.169.254",
    "2852039166",
    "0xA9FEA9FE",
    "0251.0376.0251.0376",
    "169.254.43518",
    "169.16689662",
    "0xa9.254.0xa9.0376",
    "[::a9fe:a9fe]",
    "[::169.254.169.254]",
    "[::ffff:0:169.254.169.254]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[64:ff9b:1:a9fe:a9:fe00:808:808]",
    "[64:ff9b:1:a9:fe:a9fe:808:808]",
    "[64:ff9b:1:0:a9:fea9:fe08:808]",
    "[2001:0:a9fe:a9fe::5601:5601]",
    "[2001:0:808:808:0:ffff:5601:5601]",
    "[0:0:0:0:0:ffff:a9fe:a9fe]",
    "[0:0:0:0:0:ffff:169.254.169.254]",
    "[64:ff9b:0:0:0:0:a9fe:a9fe]",
    "[2002:a9fe:a9fe:0:0:0:0:0]",
    "[fe80:0:0:0:0:0:0:1]",
    "[fd00:ec2:0:0:0:0:0:254]",
    "[fd20:ce:0:0:0:0:0:254]",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "169.254.170.2",
    "0.0.0.0",
    "0",
    "[0:0:0:0:0:0:0:0]",
    "224.0.0.1",
    "[ff02:0:0:0:0:0:0:1]",
    "255.255.255.255",
)
OPTIONS = ("--upload-pack=id", "-oProxyCommand=id", "--exec=id", "-u", "--", "-c", "--config=x")
CONTROLS = ("\n", "\r", "\t", "\0", "\x1b", "\x7f", " ", "\u2028", "\u202e", "\x85")
LETTERS = ("\u00e9", "\u6f22", "\u0456", "\uff0e", "\uff0d")
SHELL = ("$(id)", "`id`", ";id", "|id", "&id", "<x", ">x", "'x", '"x', "{a,b}", "*", "!x", "^x")

Make = Callable[[random.Random], str]


def name(chance: random.Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return "".join(chance.choices(letters, k=chance.randrange(1, 9)))


def inside(text: str, bit: str, chance: random.Random) -> str:
    at = chance.randrange(0, len(text) + 1)
    return text[:at] + bit + text[at:]


GIT_URLS: dict[str, Make] = {
    "ext": lambda c: c.choice(("ext::sh -c id", f"ext::{name(c)}", f"ext::https://{name(c)}/a")),
    "helper": lambda c: f"{name(c)}::https://{name(c)}/{name(c)}",
    "file": lambda c: c.choice(("file:///etc", f"file://{name(c)}/a", "/etc", "./a", "../a", "~")),
    "other scheme": lambda c: (
        c.choice(("http", "git", "ftp", "ftps", "rsync", "git+ssh", "HTTPS", "gopher", "s3", "fd"))
        + f"://{name(c)}/{name(c)}"
    ),
    "scp form": lambda c: f"{name(c)}@{name(c)}:{name(c)}.git",
    "option": lambda c: c.choice(OPTIONS),
    "option as host": lambda c: f"ssh://{c.choice(OPTIONS)}/{name(c)}",
    "option as user": lambda c: f"ssh://{c.choice(OPTIONS)}@{name(c)}/{name(c)}",
    "password": lambda c: f"https://{name(c)}:{name(c)}@git.example/{name(c)}",
    "user": lambda c: f"https://{name(c)}@git.example/{name(c)}",
    "ssh password": lambda c: f"ssh://{name(c)}:{name(c)}@git.example/{name(c)}",
    "control": lambda c: inside(FINE, c.choice(CONTROLS), c),
    "encoded control": lambda c: (
        f"{FINE}/%{c.choice(('00', '0a', '0d', '1b', '7F', '0A'))}{name(c)}"
    ),
    "traversal": lambda c: f"https://git.example/{c.choice(('..', '.', 'a/..', 'a/./b', '../..'))}",
    "encoded traversal": lambda c: (
        f"https://git.example/a/{c.choice(('%2e%2e', '%2E%2e', '.%2e', '%2e'))}/{name(c)}"
    ),
    "encoded slash": lambda c: f"https://git.example/a/..%2f..%2f{name(c)}",
    "encoded backslash": lambda c: f"https://git.example/a%5c{name(c)}",
    "backslash": lambda c: inside(FINE + "/x", "\\", c),
    "query": lambda c: f"{FINE}?{name(c)}={name(c)}",
    "fragment": lambda c: f"{FINE}#{name(c)}",
    "shell": lambda c: f"{FINE}/{c.choice(SHELL)}",
    "not UTF-8": lambda c: f"{FINE}/%{c.choice(('ff', 'fe', 'c0%80', 'ed%a0%80'))}",
    "letters from elsewhere": lambda c: "https://g\u0456t.example/" + c.choice(LETTERS),
    "port": lambda c: f"https://git.example:{c.choice(('0', '99999', '-1', 'x', '65536', ''))}/a",
    "no host": lambda c: c.choice(
        ("https:///a", "https://", "ssh://", "https://:443/a", "ssh:///a")
    ),
    "no path": lambda c: c.choice(("https://git.example", "https://git.example/", "ssh://h")),
    "two colons": lambda c: f"https://git.example/{name(c)}::{name(c)}",
    "too long": lambda c: f"{FINE}/{'a' * c.randrange(2048, 9000)}",
    "empty": lambda c: c.choice(("", " ", "\n")),
    "forbidden address": lambda c: f"https://{c.choice(FORBIDDEN)}/{name(c)}",
    "forbidden address by ssh": lambda c: f"ssh://git@{c.choice(FORBIDDEN)}/{name(c)}",
}

S3_URLS: dict[str, Make] = {
    "other scheme": lambda c: c.choice(("ftp", "file", "S3", "ext", "git", "s3a")) + "://bucket/a",
    "ext": lambda c: f"ext::{name(c)}",
    "key in the URL": lambda c: f"s3://{name(c)}:{name(c)}@bucket/a",
    "user": lambda c: f"https://{name(c)}@minio.example/bucket/a",
    "control": lambda c: inside("s3://bucket/prefix", c.choice(CONTROLS[:7]), c),
    "encoded control": lambda c: f"s3://bucket/a%{c.choice(('00', '0a', '0D', '1b'))}b",
    "traversal": lambda c: f"s3://bucket/{c.choice(('..', 'a/../b', './a', 'a/.', '../../x'))}",
    "encoded traversal": lambda c: f"s3://bucket/{c.choice(('%2e%2e', '.%2e', '%2e'))}/{name(c)}",
    "query": lambda c: f"s3://bucket/a?{name(c)}",
    "fragment": lambda c: f"s3://bucket/a#{name(c)}",
    "backslash": lambda c: f"s3://bucket/a\\{name(c)}",
    "no bucket": lambda c: c.choice(("s3://", "s3:///a", "https://minio.example", "s3://a")),
    "bucket as option": lambda c: f"s3://{c.choice(OPTIONS)}/a",
    "port": lambda c: f"http://minio.example:{c.choice(('0', '99999', 'x', '65536'))}/bucket/a",
    "forbidden address": lambda c: f"http://{c.choice(FORBIDDEN)}/latest/meta-data",
    "forbidden address with TLS": lambda c: f"https://{c.choice(FORBIDDEN)}/latest/{name(c)}",
}

REFS: dict[str, Make] = {
    "option": lambda c: c.choice(OPTIONS) + name(c),
    "control": lambda c: inside("main" + name(c), c.choice(CONTROLS), c),
    "refspec": lambda c: f"{name(c)}:{name(c)}",
    "forced": lambda c: f"+{name(c)}",
    "history": lambda c: name(c) + c.choice(("^", "~1", "^{commit}", "@{1}", "@{upstream}", "^@")),
    "range": lambda c: f"{name(c)}..{name(c)}",
    "traversal": lambda c: c.choice(("../", "a/../", "refs/heads/../../")) + name(c),
    "glob": lambda c: name(c) + c.choice("*?["),
    "slashes": lambda c: c.choice(("/a", "a//b", "a/", "//")),
    "dots": lambda c: c.choice((".a", "a.", "a/.b", "a.lock", "a.lock/b", ".")),
    "shell": lambda c: name(c) + c.choice(SHELL[:10]),
    "backslash": lambda c: f"{name(c)}\\{name(c)}",
    "letters from elsewhere": lambda c: name(c) + c.choice(LETTERS),
    "too long": lambda c: "a" * c.randrange(256, 5000),
}

FOLDERS: dict[str, Make] = {
    "traversal": lambda c: c.choice(("..", "../a", "a/..", "a/../../b", ".", "./a", "a/./b")),
    "absolute": lambda c: f"/{name(c)}",
    "empty component": lambda c: f"{name(c)}//{name(c)}",
    "control": lambda c: name(c) + c.choice(CONTROLS[:6]) + name(c),
    "backslash": lambda c: f"..\\{name(c)}",
    "too long": lambda c: "/".join(["p" * 99] * 50),
    "too deep": lambda c: "d/" * c.randrange(100, 300) + "x",
}
