"""Exported pages hold all that they need."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "ci"))

import export  # noqa: E402


def test_a_page_with_widgets_names_only_files_that_lie_beside_it(tmp_path):
    page = export.export(ROOT / "notebooks" / "02_shared_state_and_its_price.ipynb", tmp_path)
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r'(?:src|href)="([^"#]+)"', re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    )
    local = [n for n in named if not n.startswith(("data:", "http", "mailto:"))]
    assert local
    for name in local:
        if not name.endswith(".html"):
            path = (page.parent / name).resolve()
            assert path.exists() or (ROOT / "notebooks" / name).resolve().exists(), name
    assert "../assets/embed-amd.js" in text
    assert not re.findall(r'<script[^>]*src="http', text)


def test_links_between_notebooks_become_links_between_pages(tmp_path):
    page = export.export(ROOT / "notebooks" / "03_passphrase_experiment.ipynb", tmp_path)
    assert 'href="02_shared_state_and_its_price.html"' in page.read_text(encoding="utf-8")


def test_the_scripts_come_with_their_licences(tmp_path):
    export.export(ROOT / "notebooks" / "01_kv_cache_fundamentals.ipynb", tmp_path)
    text = (tmp_path / "assets" / "LICENSES.txt").read_text(encoding="utf-8")
    assert "html-manager" in text
    assert "RequireJS" in text
