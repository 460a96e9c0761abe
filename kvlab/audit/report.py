"""The report: JSON for machines, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from kvlab.audit.audit import SAYS, Result
from kvlab.plots.audit import audit_arms, first_token_times

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse }
td, th { border: 1px solid #bbb; padding: .3rem .6rem; text-align: left }
.verdict { border-left: .5rem solid #0072B2; padding: .5rem 1rem; background: #f4f7fa }
.bad { border-color: #E69F00 } .unknown { border-color: #999 } img { max-width: 100% }
"""
LOOK = {"isolated": "", "cannot tell": "unknown"}


def write(result: Result, folder: Path) -> list[Path]:
    """Write `audit.json` and `audit.html` into `folder`, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = finite(result.to_dict())
    plain["made"] = datetime.now(UTC).isoformat(timespec="seconds")
    plain["machine"] = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    files = {
        folder / "audit.json": json.dumps(plain, indent=1, ensure_ascii=False) + "\n",
        folder / "audit.html": page(result, plain["made"]),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)


def finite(value: Any) -> Any:
    """The same without infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def page(result: Result, made: str) -> str:
    """The whole page, pictures inside."""
    text = html.escape
    facts = {
        "engine": result.engine,
        "reference": f"{result.reference}; it cannot rule out: {result.cannot_rule_out}",
        "tenant knob": result.tenant_knob or "none found",
        "does it reuse prefixes?": result.reuse,
        "requests sent": str(result.requests),
        "made": made,
        **{f"noise: {k}": f"{v:.3g}" if isinstance(v, float) else str(v)
           for k, v in result.noise.items()},
    }  # fmt: skip
    rows = "".join(f"<tr><th>{text(k)}</th><td>{text(v)}</td></tr>" for k, v in facts.items())
    findings = "".join(
        f"<tr><td>{text(f.kind)}</td><td>{text(f.arm)}</td><td>{text(f.tenant)}</td>"
        f"<td>{text(f.detail)}</td><td>{_margin(f.margin)}</td></tr>"
        for f in result.findings[:50]
    )
    arms: dict[str, Counter[str]] = {}
    for arm in result.arms:  # some arms are run twice
        if not arm.name.startswith("a stranger"):
            arms.setdefault(arm.name, Counter()).update(arm.counts)
    parts = [
        f"<h1>Isolation audit of {text(result.engine)}</h1>",
        f"<p class='verdict {LOOK.get(result.verdict, 'bad')}'><b>{text(result.verdict)}</b>: "
        f"{text(result.explanation)}</p>",
        f"<table>{rows}</table>",
    ]
    if arms:
        parts += ["<h2>What each arm found</h2>", _image(audit_arms(arms), _told(arms))]
    if findings:
        heads = "".join(f"<th>{h}</th>" for h in ("kind", "arm", "whose", "what", "margin"))
        parts += [f"<h2>Findings</h2><table><tr>{heads}</tr>{findings}</table>"]
        if len(result.findings) > 50:
            parts.append(f"<p>The first 50 of {len(result.findings)}; all are in audit.json.</p>")
    parts += ["<h2>What a stranger can learn without a wrong answer</h2>", _timing(result)]
    parts += [f"<p>Note: {text(note)}.</p>" for note in result.notes]
    body = "\n".join(parts)
    title = f"Isolation audit: {text(result.verdict)}"
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style><body>{body}</body></html>\n"
    )


def _margin(margin: float | None) -> str:
    return "not told" if margin is None else f"{margin:.3g}"


def _timing(result: Result) -> str:
    if not result.timing:
        return "<p>Not measured.</p>"
    lines, groups = [], {}
    for name, told in result.timing.items():
        cached = told.get("cached tokens, right guess")
        count = f"cached tokens {min(cached)} to {max(cached)}" if cached else "counts not told"
        by_time = f"AUC {told['AUC']:.2f}, p {told['p']:.1g}" if "AUC" in told else "not timed"
        lines.append(f"<li>{html.escape(name)}: {SAYS[told['leaks']]} ({count}; {by_time})</li>")
        if "AUC" in told:
            groups[name] = (told["first token, right guess"], told["first token, wrong guess"])
    picture = (
        _image(first_token_times(groups), "First-token times, see the list.") if groups else ""
    )
    return f"<ul>{''.join(lines)}</ul>{picture}"


def _told(arms: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(f"{a}: {', '.join(f'{n} {k}' for k, n in c.items())}" for a, c in arms.items())


def _image(figure: Figure, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": ""})
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{html.escape(alt, quote=True)}' src='data:image/png;base64,{data}'>"
