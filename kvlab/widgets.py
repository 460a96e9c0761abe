"""What widgets of notebooks are made of, and the memory calculator."""

from __future__ import annotations

import base64
import html
import io

import ipywidgets as W
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from kvlab.memory import BYTES, cache_bytes
from kvlab.plots.style import FONT, FONT_NAME

PRESETS = {
    "7B, full heads": (32, 32, 128),
    "7B, grouped heads": (32, 8, 128),
    "bundled model": (6, 8, 64),
}
"""Layers, key/value heads, head dim."""


def chinese_font(css_class: str) -> str:
    """A style sheet that brings the bundled font, for pages on machines without Chinese fonts.

    Args:
        css_class: Class of the widget that the font is for.
    """
    data = base64.b64encode(FONT.read_bytes()).decode()
    return (
        f"<style>@font-face {{font-family: '{FONT_NAME}'; src: url(data:font/otf;base64,{data})}}"
        f".{css_class}, .{css_class} textarea, .{css_class} button, .{css_class} p, "
        f".{css_class} table {{font-family: system-ui, sans-serif, '{FONT_NAME}'}}</style>"
    )


def figure_png(figure: Figure) -> bytes:
    """A figure as a small PNG of 128 colours; the figure is closed."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, dpi=85)  # constrained layout leaves no margin to cut
    plt.close(figure)
    Image.open(full).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    return small.getvalue()


def figure_html(figure: Figure, alt: str) -> str:
    """A figure as an `<img>` with alternative text; the figure is closed."""
    data = base64.b64encode(figure_png(figure)).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


def memory_calculator() -> W.VBox:
    """The memory formula with controls for each factor; moving them needs a running kernel."""
    style = {"description_width": "110px"}

    def number(name: str, value: int, low: int, high: int, step: int = 1) -> W.IntSlider:
        return W.IntSlider(
            value, low, high, step, description=name, style=style, continuous_update=False
        )

    preset = W.Dropdown(options=list(PRESETS), description="preset", style=style)
    layers, heads, dim = (
        number(name, value, 1, high)
        for name, value, high in zip(
            ("layers", "KV heads", "head dim"),
            PRESETS["7B, full heads"],
            (96, 96, 256),
            strict=True,
        )
    )
    length = number("tokens", 2048, 128, 32768, 128)
    requests = number("requests", 16, 1, 128)
    dtype = W.Dropdown(options=list(BYTES), value="float16", description="dtype", style=style)
    out = W.HTML()

    def show(*_: object) -> None:
        one = cache_bytes(layers.value, heads.value, dim.value, length.value, dtype.value)
        out.value = (
            f"<b>one request: {one / 1e6:,.0f} MB</b>; {requests.value} requests: "
            f"<b>{one * requests.value / 1e9:,.2f} GB</b>"
        )

    def load(*_: object) -> None:
        layers.value, heads.value, dim.value = PRESETS[preset.value]

    preset.observe(load, "value")
    for control in (layers, heads, dim, length, requests, dtype):
        control.observe(show, "value")
    show()
    return W.VBox([preset, layers, heads, dim, length, requests, dtype, out])
