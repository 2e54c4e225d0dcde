"""The API reference as Markdown, from the schemas of the CRDs."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from torchrun_api.generate.structural import NOT_SUPPORTED
from torchrun_api.json import JsonObject, JsonValue

_HEAD = """# API reference

Group `torchrun.ai`, version `v1alpha1`. `kubectl explain torchrunjob.spec` shows the same on a
cluster. This page is generated from the types in `api/torchrun_api`.
"""
_BOUNDS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "maxLength": "at most {} characters",
    "maxItems": "at most {} entries",
    "maxProperties": "at most {} entries",
}


def reference(schemas: Mapping[str, JsonObject]) -> str:
    """One page for all kinds; a table for each object, in the order of the types."""
    sections = [_HEAD]
    for kind, schema in schemas.items():
        sections.append(f"## {kind}\n\n{schema['description']}\n{_rules(schema)}")
        properties = _object(schema["properties"])
        for part in ("spec", "status"):
            sections += _tables(part, _object(properties[part]))
    return _linked("\n".join(sections))


def _linked(page: str) -> str:
    """Link the type of each field that has a table to that table."""
    seen: Counter[str] = Counter()
    kind, anchors = "", {}
    for mark, title in re.findall(r"(?m)^(##+) (.+)$", page):
        kind = title if mark == "##" else kind
        slug = re.sub(r"[^\w-]", "", title.lower())
        anchors[kind, title] = f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1
    lines, path = [], ""
    for line in page.split("\n"):
        if heading := re.match(r"(##+) (.+)", line):
            kind, path = (heading[2], "") if heading[1] == "##" else (kind, heading[2])
        row = re.match(r"\| `(\w+)` \| (object|list of object) \|", line)
        table = f"{path}.{row[1]}{'[]' if row[2] != 'object' else ''}" if row else ""
        if row and (kind, table) in anchors:
            linked = row[0].replace("object |", f"[object](#{anchors[kind, table]}) |")
            line = linked + line.removeprefix(row[0])
        lines.append(line)
    return "\n".join(lines)


def _tables(path: str, schema: JsonObject) -> Iterator[str]:
    required = schema.get("required", [])
    assert isinstance(required, list)
    properties = {
        name: field
        for name, value in _object(schema["properties"]).items()
        if not str((field := _object(value)).get("description", "")).startswith(NOT_SUPPORTED)
    }
    rows = [
        f"| `{name}` | {_type(field)} | {_meaning(field, name in required)} |"
        for name, field in properties.items()
    ]
    table = "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])
    yield f"### {path}\n\n{schema['description']}\n\n{table}\n{_rules(schema)}"
    for name, field in properties.items():
        items = _object(field.get("items", {}))
        if "properties" in field:
            yield from _tables(f"{path}.{name}", field)
        elif "properties" in items:
            yield from _tables(f"{path}.{name}[]", items)


def _type(field: JsonObject) -> str:
    if "x-kubernetes-int-or-string" in field:
        return "quantity"
    if "enum" in field:
        values = field["enum"]
        assert isinstance(values, list)
        return ", ".join(f"`{value}`" for value in values)
    match field.get("type"):
        case None:
            return "string or list of strings"
        case "array":
            return f"list of {_type(_object(field['items']))}"
        case "object" if "additionalProperties" in field:
            return f"map of {_type(_object(field['additionalProperties']))}"
        case kind:
            return "time" if field.get("format") == "date-time" else str(kind)


def _meaning(field: JsonObject, required: bool) -> str:
    notes = ["Required."] if required else []
    notes.append(" ".join(str(field.get("description", "")).split()).replace("|", "\\|"))
    if "default" in field:
        default = field["default"]
        value = str(default).lower() if isinstance(default, bool) else default
        notes.append(f"Default: `{value}`.")
    bounds = [text.format(field[key]) for key, text in _BOUNDS.items() if key in field]
    if bounds and "x-kubernetes-int-or-string" not in field:
        notes.append(f"({', '.join(bounds)})")
    return " ".join(note for note in notes if note)


def _rules(schema: JsonObject) -> str:
    rules = schema.get("x-kubernetes-validations", [])
    assert isinstance(rules, list)
    lines = [_rule(_object(rule)) for rule in rules]
    return "\n".join(["\nRules:\n", *lines, ""]) if lines else ""


def _rule(rule: JsonObject) -> str:
    subject = f"`{str(rule['fieldPath'])[1:]}` " if "fieldPath" in rule else ""
    return f"- {subject}{rule['message']}"


def _object(value: JsonValue) -> JsonObject:
    if not isinstance(value, dict):
        raise TypeError(f"an object is wanted, not {value!r}")
    return value
