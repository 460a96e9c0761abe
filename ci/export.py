"""Write the executed notebooks as web pages that work without a kernel and without a network.

The pages, their pictures and their scripts lie together in one folder, which can be copied or
served as it is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(__file__).parent / "html_assets"


def export(notebook: Path, folder: Path) -> Path:
    """Write a committed notebook below `folder`, and what it needs beside it; returns the page."""
    place = notebook.relative_to(ROOT)
    page = folder / place.with_suffix(".html")
    page.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ASSETS, folder / "assets", dirs_exist_ok=True)
    shutil.copytree(ROOT / "figures", folder / "figures", dirs_exist_ok=True)
    book = nbformat.read(notebook, 4)
    for cell in book.cells:
        if cell.cell_type == "markdown":  # a link to a notebook becomes a link to its page
            cell.source = re.sub(r"(\]\([\w./]+)\.ipynb\)", r"\1.html)", cell.source)
    assets = "../" * (len(place.parts) - 1) + "assets"
    exporter = HTMLExporter(
        widget_renderer_url=f"{assets}/embed-amd.js",
        require_js_url=f"{assets}/require.js",
        mathjax_url="",
    )
    html, _ = exporter.from_notebook_node(book, {"metadata": {"name": notebook.stem}})
    page.write_text(html, encoding="utf-8")
    return page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "html")
    options = parser.parse_args(arguments)
    books = sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.ipynb"))
    for book in books:
        print(export(book, options.output))
    return 0 if books else 1


if __name__ == "__main__":
    sys.exit(main())
