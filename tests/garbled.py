"""Responses with status 200 and a wrong body, as proxies and broken servers send."""

import pytest

GARBLED = [
    pytest.param(b"", id="empty"),
    pytest.param(b"<html>login</html>", id="a login page"),
    pytest.param(b'{"kind":"\xff"}', id="no UTF-8"),
    pytest.param(b'{"metadata":{"name":"\xff"}}', id="no UTF-8 in a name"),
    pytest.param(b'{"items":' + b"[" * 5000, id="deep"),
    pytest.param(b'{"metadata":' * 5000, id="deep objects"),
    pytest.param(b"{}", id="another object"),
    pytest.param(b"[]", id="a list"),
    pytest.param(
        b'{"metadata":{"name":"a","uid":"u","resourceVersion":""},'
        b'"items":[{"metadata":{"name":"a","resourceVersion":""}}]}',
        id="no version",
    ),
    pytest.param(b'{"metadata":{"uid":"u","resourceVersion":"new"}}', id="a version of letters"),
]
