"""The configuration file: YAML or JSON, strict, with every mistake named."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from deviceplugin.config.settings import (
    FIELDS,
    FILE_VERSION,
    GROUPS,
    Settings,
    flatten,
    json_schema,
)


def read_yaml(text: str) -> tuple[Any, list[str]]:
    """Read YAML, of which JSON is a part.

    Returns:
        The content, and a sentence for each key that is set twice: YAML says that
        keys are unique, and PyYAML takes the last one in silence.

    Raises:
        ValueError: it is no YAML; the text says where.
    """
    import yaml  # costs 10 ms that a daemon without a file need not pay

    twice: list[str] = []

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue  # "<<" brings in keys that may be set again
                key = self.construct_object(key_node, deep=True)
                if repr(key) in seen:
                    twice.append(f"line {key_node.start_mark.line + 1}: {key}: is set twice")
                seen.add(repr(key))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, UniqueKeyLoader), twice  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # LookupError and AttributeError: PyYAML's answer to such as `!!int ""` and `!!bool 7`
        raise ValueError(" ".join(str(error).split())) from error


def parse(name: str, text: str, mistakes: list[str]) -> dict[str, Any]:
    """The file's settings by key; {} and a mistake when it cannot be used."""
    try:
        content, twice = read_yaml(text)
    except ValueError as error:
        mistakes.append(f"file {name}: is neither YAML nor JSON: {error}")
        return {}
    mistakes += (f"file {name}: {text}" for text in twice)
    if not isinstance(content, dict):
        mistakes.append(
            f"file {name}: must hold keys and values, starting with 'version: {FILE_VERSION}'"
        )
        return {}
    content = _text_keys(content)
    body = flatten({key: value for key, value in content.items() if key != "version"})
    good = content.get("version") == FILE_VERSION
    if good:
        try:
            msgspec.convert(body, Settings)
        except msgspec.ValidationError:
            good = False
    if not good:
        mistakes += (f"file {name}: {text}" for text in _explain(content))
        return {}
    return body


def _text_keys(content: Any) -> Any:
    """With numbers as keys, as YAML reads them, turned into text, as JSON has them."""
    if not isinstance(content, dict):
        return content
    return {
        str(key) if isinstance(key, int) and not isinstance(key, bool) else key: _text_keys(value)
        for key, value in content.items()
    }


def _explain(content: Mapping[Any, Any]) -> Iterator[str]:
    """Every way in which the content breaks the schema. msgspec stops at the first."""
    import jsonschema  # needed only when something is wrong

    known = ["version", *(field.key for field in FIELDS)]
    for key in flatten(content):
        if key not in known and key not in GROUPS:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{key}: unknown key{hint}"
    if "version" not in content:
        yield f"version: is missing; this release reads 'version: {FILE_VERSION}'"
    for error in jsonschema.Draft202012Validator(json_schema()).iter_errors(content):
        if error.validator in ("additionalProperties", "required"):
            continue
        path = ".".join(str(part) for part in error.absolute_path)
        if path == "version":
            yield f"version: is {error.instance!r}; this release reads '{FILE_VERSION}'"
        else:
            yield f"{path}: {error.message}"
