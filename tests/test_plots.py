import matplotlib.pyplot as plt
import pytest
from matplotlib import font_manager

from kvlab import plots, widgets
from kvlab.models import load_model


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def test_the_bundled_font_has_every_chinese_character_of_the_vocabulary():
    vocabulary = load_model().tokenizer.get_vocab()
    chinese = {c for piece in vocabulary for c in piece if "一" <= c <= "鿿"}
    font = font_manager.get_font(str(plots.style.FONT))
    missing = {c for c in chinese if not font.get_char_index(ord(c))}
    assert len(chinese) > 500
    assert not missing


def test_a_picture_is_saved_only_where_the_environment_says(tmp_path, monkeypatch):
    figure = plots.work_grid()
    monkeypatch.delenv("KVLAB_FIGURES", raising=False)
    plots.save(figure, "x")
    monkeypatch.setenv("KVLAB_FIGURES", str(tmp_path / "new"))
    plots.save(figure, "x")
    assert (tmp_path / "new" / "x.png").stat().st_size > 1000


def test_owners_are_told_apart_without_colour():
    figure = plots.slots([[("A", "x"), ("B", "y"), None]], "t")
    hatches = {p.get_hatch() for p in figure.axes[0].patches[:2]}
    assert len(hatches) == 2


def test_a_picture_in_a_page_has_alternative_text_and_its_figure_is_closed():
    assert '<img alt="a &lt; b"' in widgets.figure_html(plots.work_grid(), "a < b")
    assert plt.get_fignums() == []


def test_the_calculator_follows_its_controls():
    box = widgets.memory_calculator()
    preset, _, heads, *_, requests, dtype, out = box.children
    assert "1,074 MB" in out.value
    preset.value = "7B, grouped heads"
    assert heads.value == 8
    assert "268 MB" in out.value
    requests.value, dtype.value = 2, "float32"
    assert "537 MB" in out.value
    assert "1.07 GB" in out.value
