"""The slot-collision lab of notebook 04: two requests, one switch, and everything that shows it."""

from kvlab.lab.controls import OWN, SlotLab
from kvlab.lab.page import answers, panel, picture, picture_alt
from kvlab.lab.scene import PRESETS, SLOT_ROWS, STATES, Scene, play, preset

__all__ = [
    "OWN",
    "PRESETS",
    "SLOT_ROWS",
    "STATES",
    "Scene",
    "SlotLab",
    "answers",
    "panel",
    "picture",
    "picture_alt",
    "play",
    "preset",
]
