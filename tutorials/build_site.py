"""Build the documentation site: ``python tutorials/build_site.py OUT`` (``make docs``). Needs the extra ``docs``.

Pages keep their places in the repository, so that their links work; the README is the first page. Notebooks become
Markdown with MathML, and every public class has a page made from its docstrings. Nothing is loaded from other hosts,
and a broken link or reference is an error.
"""

from __future__ import annotations

import ast
import base64
import json
import logging
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "callbacks",
    "losses",
    "advantages",
    "rewards",
    "tasks",
    "engines",
    "data",
    "recordings",
    "policy",
    "metrics",
)
"""Packages whose public classes have pages, beside those of ``lgrpo`` itself."""
TASKS = ("MATH", "MATH500", "AIME24", "GSM8K")
"""Classes whose names look like constants."""
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
PAPER = re.compile(r"\((?P<authors>[^(),]+), arXiv (?P<number>\d{4}\.\d{5})")


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        source, config = Path(folder) / "docs", Path(folder) / "mkdocs.yml"
        pages = sorted((ROOT / "tutorials" / "pages").glob("*.md"))
        notebooks = sorted((ROOT / "tutorials").glob("[0-9]*.ipynb"))
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *pages]:
            write_page(path, path.read_text(encoding="utf-8"), source)
        (source / "README.md").rename(source / "index.md")
        for path in notebooks:
            write_page(path, notebook_as_markdown(path, source), source)
        classes = write_class_pages(source / "api")
        (source / "papers.md").write_text(papers(), encoding="utf-8")
        config.write_text("site_name: lgrpo\n")
        own = settings(source, pages, notebooks, classes)
        build(load_config(str(config), strict=True, site_dir=str(Path(sys.argv[1]).resolve()), **own))
    out = sys.argv[1]
    print(f"The site is {out}/index.html; its search needs a server: python -m http.server --directory {out}")


def write_page(path: Path, text: str, source: Path) -> None:
    """Write a page to its place among the sources of the site, with the files it links to."""
    for link in set(LINK.findall(text)):
        linked = (path.parent / link).resolve()
        if linked.suffix == ".md" and linked.is_relative_to(ROOT / "tests"):
            write_page(linked, linked.read_text(encoding="utf-8"), source)
        elif linked.is_file() and linked.suffix not in (".md", ".ipynb"):
            copy = source / linked.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, copy)
    page = (source / path.relative_to(ROOT)).with_suffix(".md")
    page.parent.mkdir(parents=True, exist_ok=True)
    text = re.sub(r"\.ipynb(\)|#)", r".md\1", text).replace("](README.md", "](index.md")
    page.write_text(re.sub(r"\]\((\.\./)+README\.md", "](/index.md", text), encoding="utf-8")


# Notebooks


def notebook_as_markdown(path: Path, source: Path) -> str:
    """Return the cells of a notebook with their outputs; pictures become files."""
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\$([^$\n]+)\$", lambda found: convert(found[1]), text))
            continue
        parts.append(f"```python\n{text}\n```")
        for index, output in enumerate(cell["outputs"]):
            parts.append(output_as_markdown(output, source / "tutorials" / f"{path.stem}-{number}-{index}.png"))
    return "\n\n".join(filter(None, parts)) + "\n"


def output_as_markdown(output: dict[str, Any], picture: Path) -> str:
    """Return one output of a cell."""
    data = output.get("data", {})
    if "image/png" in data:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        return f"![output]({picture.name})"
    if "text/html" in data:
        return "".join(data["text/html"])
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""


# Classes


def write_class_pages(folder: Path) -> dict[str, list[str]]:
    """Write a page for every public class, and return the names of the classes by package."""
    exports = assigned("lgrpo/__init__.py", "_MODULES")
    found = {f"lgrpo.{name}": assigned(f"lgrpo/{name}/__init__.py", "__all__") for name in PACKAGES}
    for name, module in exports.items():
        if module not in PACKAGES:
            found.setdefault(f"lgrpo.{module}", []).append(name)
    classes = {
        package: sorted(name for name in names if (name[0].isupper() and not name.isupper()) or name in TASKS)
        for package, names in found.items()
    }
    folder.mkdir(parents=True)
    for package, names in classes.items():
        for name in names:
            (folder / f"{package}.{name}.md").write_text(f"::: {package}.{name}\n", encoding="utf-8")
    return classes


def assigned(file: str, name: str) -> Any:
    """Return the value of a name at the top level of a file, which is not imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assignments = (node for node in tree.body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in assignments if getattr(node.targets[0], "id", "") == name)


class Doctests(griffe.Extension):
    """Shows the examples in docstrings as code: outputs such as ``[1.0, 2.0]`` would be read as links."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            blocks = re.split(r"\n\s*\n", obj.docstring.value)
            blocks = [f"```pycon\n{b}\n```" if b.lstrip().startswith(">>>") else b for b in blocks]
            obj.docstring.value = "\n\n".join(blocks)


# Papers


def papers() -> str:
    """Return the page of papers, from the first lines of the configs."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        for match in PAPER.finditer(path.read_text(encoding="utf-8")):
            configs = found.setdefault((match["number"], match["authors"]), [])
            if (name := path.relative_to(ROOT).as_posix()) not in configs:
                configs.append(name)
    lines = [
        f"| {authors} | [{number}](https://arxiv.org/abs/{number}) | {', '.join(f'`{name}`' for name in configs)} |"
        for (number, authors), configs in sorted(found.items())
    ]
    start = ["# Papers", "", "The papers whose methods or experiments have a config.", ""]
    return "\n".join([*start, "| authors | arXiv | configs |", "|---|---|---|", *lines, ""])


# The site


def settings(source: Path, pages: list[Path], notebooks: list[Path], classes: dict[str, list[str]]) -> dict[str, Any]:
    """Return the settings of MkDocs."""
    python = {
        "paths": [str(ROOT)],
        "options": {
            "merge_init_into_class": True,
            "extensions": [f"{__file__}:Doctests"],
            "heading_level": 1,
            "separate_signature": True,
            "show_root_full_path": False,
            "show_root_heading": True,
            "show_signature_annotations": True,
            "docstring_section_style": "table",
            "show_source": False,
            "filters": ["!^_"],
            "inherited_members": False,
        },
    }
    toggles = [
        {"media": f"(prefers-color-scheme: {scheme})", "scheme": name, "toggle": {"icon": icon, "name": f"use {other}"}}
        for scheme, name, icon, other in (
            ("light", "default", "material/weather-night", "dark colours"),
            ("dark", "slate", "material/weather-sunny", "light colours"),
        )
    ]
    return {
        "docs_dir": str(source),
        "theme": {
            "name": "material",
            "font": False,
            "features": [
                "navigation.sections",
                "navigation.indexes",
                "navigation.top",
                "content.code.copy",
                "toc.follow",
            ],
            "palette": toggles,
        },
        "plugins": [{"search": {}}, {"mkdocstrings": {"handlers": {"python": python}}}],
        "markdown_extensions": [
            "admonition",
            "md_in_html",
            "pymdownx.superfences",
            "pymdownx.highlight",
            "tables",
            {"toc": {"permalink": True, "slugify": slugify(case="lower")}},  # anchors as on GitHub
        ],
        "validation": {"links": {"anchors": "warn", "absolute_links": "relative_to_docs"}},
        "nav": [
            {"Home": "index.md"},
            {"Tutorials": [f"tutorials/{path.stem}.md" for path in notebooks]},
            {"Pages": [f"tutorials/pages/{path.name}" for path in pages]},
            {
                "Classes": [
                    {package: [{name: f"api/{package}.{name}.md"} for name in names]}
                    for package, names in classes.items()
                ]
            },
            {"Papers": "papers.md"},
            {"Changelog": "CHANGELOG.md"},
            {"Contributing": "CONTRIBUTING.md"},
        ],
    }


if __name__ == "__main__":
    main()
