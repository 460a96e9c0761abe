"""The lab's controls: a switch that needs no kernel, and a closer look and free text that do."""

from __future__ import annotations

import html
from collections.abc import Sequence

import ipywidgets as W

from kvlab import plots
from kvlab.decode import recompute
from kvlab.lab.page import answers, panel, picture, picture_alt
from kvlab.lab.scene import PRESETS, SLOT_ROWS, STATES, Scene, play, preset
from kvlab.models import LoadedModel
from kvlab.request import Request
from kvlab.widgets import chinese_font, figure_html

OWN = "your own text"
NEW_TOKENS = 24
KERNEL_NOTE = (
    "<small>These controls need a running kernel. In an exported page they can be moved, but the "
    "picture stays as it is; the switch above works everywhere.</small>"
)


def page(scene: Scene) -> str:
    """All that the lab shows of a scene, as HTML."""
    return answers(scene) + figure_html(picture(scene), picture_alt(scene))


def spelled(loaded: LoadedModel, text: str) -> str:
    """The tokens of a text as HTML; bytes of characters that the tokenizer lacks are framed."""
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    raw = loaded.tokenizer.convert_ids_to_tokens(ids)
    is_byte = [t.startswith("<0x") for t in raw]
    parts = [
        f'<span style="border:1px dashed #D55E00" title="a byte">{html.escape(p)}</span>'
        if byte
        else html.escape(p)
        for p, byte in zip(loaded.pieces(ids), is_byte, strict=True)
    ]
    note = f"; {sum(is_byte)} of them bytes of unknown characters (framed)" if any(is_byte) else ""
    return f"<small>{len(ids)} tokens{note}: {'·'.join(parts)}</small>"


class SlotLab:
    """Two requests and one switch. `view` is the widget that a notebook shows.

    The presets are computed at the start, so that the switch answers in the browser alone.
    """

    def __init__(self, loaded: LoadedModel, presets: Sequence[str] = tuple(PRESETS)) -> None:
        self.loaded, self.presets = loaded, presets
        self.scenes: dict[tuple[str, str], Scene] = {}
        for name in presets:
            self._play(name, *preset(loaded, name))
        self._build_switch()
        self._build_closer_look()
        self._build_own_text()
        self.view = W.VBox(
            [
                W.HTML(chinese_font("kvlab-lab")),
                self.preset,
                self.state,
                self.stack,
                W.HTML("<h4>Look closer</h4>" + KERNEL_NOTE),
                self.closer,
                W.HTML("<h4>Your own text</h4>" + KERNEL_NOTE),
                self.own,
            ]
        )
        self.view.add_class("kvlab-lab")

    def _play(self, name: str, first: Request, second: Request) -> None:
        references = None
        for state in STATES:
            scene = play(self.loaded, first, second, state, references)
            self.scenes[name, state], references = scene, scene.references

    # The switch: every page is there already, the browser only turns them over.

    def _build_switch(self) -> None:
        style = {"description_width": "110px"}
        self.preset = W.Dropdown(
            options=[*self.presets, OWN], index=0, description="two requests", style=style
        )
        self.state = W.ToggleButtons(
            options=list(STATES),
            index=0,
            description="memory",
            style=style | {"button_width": "auto"},
        )
        self.pages = {
            (name, state): W.HTML(page(self.scenes[name, state]))
            for name in self.presets
            for state in STATES
        }
        for state in STATES:
            self.pages[OWN, state] = W.HTML("<p>Type two texts below and press Run.</p>")
        stacks = [
            W.Stack([self.pages[name, state] for state in STATES], selected_index=0)
            for name in (*self.presets, OWN)
        ]
        self.stack = W.Stack(stacks, selected_index=0)
        self.links = [W.jslink((self.preset, "index"), (self.stack, "selected_index"))]
        self.links += [W.jslink((self.state, "index"), (s, "selected_index")) for s in stacks]

    @property
    def scene(self) -> Scene | None:
        """The scene that is shown now."""
        return self.scenes.get((self.preset.value, self.state.value))

    # A closer look: one request, one layer, one head, one step.

    def _build_closer_look(self) -> None:
        config = self.loaded.model.config
        style = {"description_width": "110px"}

        def choice(name: str, count: int) -> W.Dropdown:
            # None as a value would mean that nothing is chosen, and show an empty menu.
            options = [f"all, the strongest {name}", *(f"{name} {i}" for i in range(count))]
            return W.Dropdown(options=options, index=0, description=name, style=style)

        self.reader = W.ToggleButtons(
            options=["first request", "second request"],
            index=0,
            description="reader",
            style=style | {"button_width": "auto"},
        )
        self.layer = choice("layer", config.num_hidden_layers)
        self.head = choice("head", config.num_attention_heads)
        self.step = W.IntSlider(2, 1, 2, description="token", style=style, continuous_update=False)
        self.detail = W.HTML()
        self.closer = W.VBox([self.reader, W.HBox([self.layer, self.head]), self.step, self.detail])
        for control in (self.preset, self.state, self.reader, self.layer, self.head, self.step):
            control.observe(self._show_detail, "value")
        self._show_detail()

    def _show_detail(self, *_: object) -> None:
        scene = self.scene
        if scene is None:
            return
        name = scene.names[self.reader.index]
        self.step.max = len(scene.probe.steps[name])
        step = min(self.step.value, self.step.max)
        layer, head = ((c.index - 1 if c.index else None) for c in (self.layer, self.head))
        shown = panel(scene, name, layer, head, step)
        kept = scene.probe.steps[name][step - 1]
        mass = kept.foreign_mass
        foreign = sum(kept.foreign or [])
        said = f"{name}, token {step}: {foreign} of {len(kept.foreign or [])} rows are foreign"
        if mass is not None:
            chosen = mass if layer is None else mass[layer : layer + 1]
            chosen = chosen if head is None else chosen[:, head]
            said += f", with {chosen.max():.0%} of its attention at most"
        self.detail.value = (
            figure_html(plots.step_detail(shown, step, scene.names), f"Attention of {said}")
            + f'<p role="group" aria-label="closer look">{said}.</p>'
        )

    # Free text.

    def _build_own_text(self) -> None:
        layout = W.Layout(width="60%")
        self.texts = {
            name: W.Textarea(description=f"text of {name}", layout=layout, rows=2)
            for name in ("A", "B")
        }
        self.messages = {name: W.HTML() for name in self.texts}
        for name, field in self.texts.items():
            field.observe(lambda change, n=name: self._check(n), "value")
        self.run = W.Button(description="Run", tooltip="compute all three states")
        self.busy = W.HTML()
        self.run.on_click(lambda _: self.compute())
        rows = [W.HBox([self.texts[n], self.messages[n]]) for n in self.texts]
        self.own = W.VBox([*rows, W.HBox([self.run, self.busy])])

    def _complain(self, name: str) -> str | None:
        """What is wrong with a text, or `None`."""
        text = self.texts[name].value
        if not text.strip():
            return "this field is empty; type a prompt"
        room = SLOT_ROWS // 2 - NEW_TOKENS
        tokens = len(self.loaded.tokenizer.encode(text))
        if tokens > room:
            return f"{tokens} tokens, and half a slot has room for {room}; shorten the text"
        return None

    def _check(self, name: str) -> bool:
        wrong = self._complain(name)
        self.messages[name].value = (
            f'<b role="alert">⚠ {wrong}</b>'
            if wrong
            else spelled(self.loaded, self.texts[name].value)
        )
        return wrong is None

    def compute(self) -> None:
        """Run the two texts in all states; the state that is shown comes first."""
        checked = [self._check(name) for name in self.texts]  # all of them, for their messages
        if not all(checked):
            return
        self.run.disabled = True
        self.busy.value = "<b role='status'>⏳ computing …</b>"
        try:
            first, second = (
                self.loaded.request(n, f.value, NEW_TOKENS) for n, f in self.texts.items()
            )
            references = {r.id: recompute(self.loaded.model, r) for r in (first, second)}
            shown = self.state.value
            for state in sorted(STATES, key=lambda s: s != shown):
                scene = play(self.loaded, first, second, state, references)
                self.scenes[OWN, state] = scene
                self.pages[OWN, state].value = answers(scene)  # the text first, it is quick
                self.preset.value = OWN
                self.pages[OWN, state].value = page(scene)
            # A busy page may have dropped the new choice while its own last move was under way.
            self.preset.send_state("index")
            self._show_detail()
        finally:
            self.run.disabled = False
            self.busy.value = ""
