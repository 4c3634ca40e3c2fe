"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from deviceplugin import config
from deviceplugin.health.catalog import CATALOG
from deviceplugin.health.record import OBSERVABLE

ROOT = Path(__file__).parent.parent
HEALTH = (ROOT / "docs/health.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def settings_table() -> str:
    """The table of the README, from the fields themselves."""
    lines = ["| flag | variable | key | default | |", "|---|---|---|---|---|"]
    for field in config.FIELDS:
        default = f"`{field.shown_default}`" if field.shown_default else ""
        variables = ", ".join(f"`{name}`" for name in field.envs)
        metavar = field.metavar.replace("|", "\\|")
        lines.append(
            f"| `{field.flag} {metavar}` | {variables} | `{field.key}` | {default}"
            f" | {field.description} |"
        )
    return "\n".join(lines)


def test_the_readme_lists_every_setting_as_it_is() -> None:
    _, rest = README.split("<!-- settings: checked by tests/test_docs.py -->\n")
    table, _ = rest.split("\n<!-- end of settings -->")
    assert table == settings_table()


def xid_table() -> str:
    """The table of docs/health.md, from the catalog itself."""
    lines = ["| Xid | what it is | class | action | here | why |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {xid.code} | {xid.text} | {xid.kind} | {xid.action or '-'} | {xid.effect.value}"
        f" | {xid.why} |"
        for xid in CATALOG.values()
    ]
    return "\n".join(lines)


def test_the_health_page_lists_every_xid_as_it_is() -> None:
    _, rest = HEALTH.split("<!-- xids: checked by tests/test_docs.py -->\n")
    table, _ = rest.split("\n<!-- end of xids -->")
    assert table == xid_table()


def test_the_health_page_names_every_source_that_can_be_observed() -> None:
    named = re.findall(r"^\| `[^|]*\| ([^|]*) \|", HEALTH, re.MULTILINE)
    sources = {source.value for source in OBSERVABLE}
    assert {name for cell in named for name in re.findall(r"`([^`]+)`", cell)} == sources


def test_the_readme_names_every_shipped_profile() -> None:
    shipped = {path.stem for path in (ROOT / "deviceplugin/sim/profiles").glob("*.yaml")}
    named = re.search(r"name of a shipped profile \(([^)]*)\)", README)
    assert named is not None
    assert set(re.findall(r"`([^`]+)`", named[1])) == shipped
    assert {"h100x8", "a100x8", "dgx1v", "l40sx8", "v100x16", "l4x1"} <= shipped


def test_the_index_of_decisions_links_every_record() -> None:
    folder = ROOT / "docs/decisions"
    linked = set(re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in folder.glob("0*.md")}


def test_links_between_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_make_targets_that_the_readme_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE)) <= targets
