"""What the lab shows of a scene: both answers as HTML, attention and writes as a picture."""

from __future__ import annotations

import html
from collections import defaultdict

from matplotlib.figure import Figure
from rapidfuzz.distance import Levenshtein

from kvlab import plots
from kvlab.lab.scene import Scene
from kvlab.plots.lab import Panel

CHANGED = "background:#F7DC9F;text-decoration:underline;text-decoration-thickness:2px"
"""Colour and underline: a difference must not depend on colour alone."""


def marked(text: str, reference: str) -> str:
    """`text` as HTML with every character marked that is not in its place in `reference`."""
    pieces = []
    for op in Levenshtein.opcodes(reference, text):
        part = html.escape(text[op.dest_start : op.dest_end])
        pieces.append(
            f'<mark style="{CHANGED}">{part}</mark>' if op.tag != "equal" and part else part
        )
    return "".join(pieces)


def answers(scene: Scene) -> str:
    """Question, answer and cold recompute of both requests, and a sentence about each."""
    lines = []
    for name in scene.names:
        text = scene.loaded.text(scene.runs[name].tokens).strip()
        reference = scene.loaded.text(scene.references[name].tokens).strip()
        prompt = scene.loaded.text(list(scene.runs[name].request.tokens)).strip()
        victim = name == scene.victim
        lines.append(
            f"<tr><th style='text-align:left;padding-right:1em'>{name}"
            f"{' (victim)' if victim else ''}</th>"
            f"<td style='text-align:left'>asks: {html.escape(prompt)}</td></tr>"
            f"<tr><td></td><td style='text-align:left;font-size:115%'>answers: "
            f'<span role="group" aria-label="answer of {name}">{marked(text, reference)}</span>'
            "</td></tr>"
            f"<tr><td></td><td style='text-align:left;color:#555'>alone: "
            f"{html.escape(reference)}</td></tr>"
        )
    told = sorted(scene.names, key=lambda n: n != scene.victim)
    story = "<br>".join(html.escape(scene.sentence(name)) for name in told)
    return (
        f'<p role="group" aria-label="what happened" style="max-width:60em;line-height:1.5">'
        f"<b>{html.escape(scene.state)}.</b> {story}</p>"
        f"<table>{''.join(lines)}</table>"
    )


def panel(
    scene: Scene,
    name: str,
    layer: int | None = None,
    head: int | None = None,
    step: int | None = None,
    title: str | None = None,
) -> Panel:
    """The attention of one request as `kvlab.plots` draws it.

    Owners are those of the given step (counted from 1), or of the last one.
    """
    steps = scene.probe.steps[name]
    last = steps[(step or len(steps)) - 1]
    rows = scene.probe.peaks(name, layer, head)
    owners = list(last.owners or [])
    foreign = list(last.foreign or [])
    missing = rows.shape[1] - len(owners)
    texts = [scene.loaded.pieces([o.token])[0] if o else "" for o in owners]
    marks: dict[int, str] = {}
    since, where = scene.exposure(name), scene.divergence(name)
    if since is not None:
        marks[since] = "reads foreign rows"
    if where is not None:
        marks[where] = "both from here" if where == since else "text is wrong"
    which = "the strongest head" if head is None else f"head {head}"
    where_ = "of all layers" if layer is None else f"of layer {layer}"
    return Panel(
        f"{title or f'what {name} attends to'}: {which} {where_}",
        rows.numpy(),
        [*texts, *[""] * missing],
        scene.loaded.pieces(scene.runs[name].tokens),
        [*(o.request if o else None for o in owners), *[None] * missing],
        [*foreign, *[False] * missing],
        marks,
    )


def picture(scene: Scene) -> Figure:
    """Attention of both requests, and the timeline of every slot."""
    slots: dict[int, list[tuple[int, str, int, int]]] = defaultdict(list)
    for w in scene.writes:
        slots[w.slot].append((w.tick, w.request, w.start, w.count))
    return plots.lab_scene([panel(scene, n) for n in scene.names], slots, scene.names)


def picture_alt(scene: Scene) -> str:
    """The picture in words."""
    said = []
    for name in scene.names:
        last = scene.probe.steps[name][-1]
        foreign = sum(last.foreign or [])
        said.append(f"{name} reads {foreign} foreign rows of {len(last.foreign or [])}")
    slots = len({w.slot for w in scene.writes})
    return (
        f"Attention heatmaps, {scene.state}: {'; '.join(said)}. "
        f"Timeline: both write {'one slot' if slots == 1 else 'a slot each'}."
    )
