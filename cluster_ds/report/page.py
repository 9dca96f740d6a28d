"""One self-contained HTML page: sections of text, tables and plotly figures, light and dark, for desks and phones.

A page asks nothing of a network: plotly's script is inlined, and a content security policy forbids everything else.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Trace = dict[str, Any]
# Told apart on white and on black, and by most people who see fewer colours (Okabe and Ito's, the yellow darkened).
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#a08500", "#8c6bb1", "#7f7f7f", "#b2182b"]
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1f;--soft:#5c5c66;--line:#d9d9e0;--paper:#ffffff;--raised:#f5f5f8;--warn:#9a3412}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8ee;--soft:#a3a3b0;--line:#3a3a44;--paper:#16161a;--raised:#202027;
--warn:#fdba74}}
*{box-sizing:border-box}
body{font:15px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:75rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.25;margin:1rem 0 .25rem}h2{font-size:1.2rem;margin:2.2rem 0 .4rem;padding-top:.6rem;
border-top:1px solid var(--line)}h3{font-size:1rem;margin:1.2rem 0 .2rem}
p{max-width:52rem;margin:.4rem 0}.soft{color:var(--soft)}.warn{color:var(--warn);font-weight:600}
.wide{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;
white-space:nowrap}
th{color:var(--soft);font-weight:600}td:first-child,th:first-child{text-align:left}
td.text,th.text{text-align:left;white-space:normal;min-width:14rem;overflow-wrap:anywhere}
pre,code{font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
pre{background:var(--raised);padding:.6rem .8rem;border-radius:.4rem;margin:.5rem 0;max-width:60rem}
details{border:1px solid var(--line);border-radius:.4rem;padding:.4rem .8rem;margin:.5rem 0}
summary{cursor:pointer;overflow-wrap:anywhere}nav a{margin-right:1rem;white-space:nowrap}a{color:inherit}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:1rem 0}
.facts div{background:var(--raised);border-radius:.4rem;padding:.5rem .7rem}.facts b{display:block;font-size:1.15rem}
.figure{width:100%}
@media(max-width:640px){td.text,th.text{min-width:9rem}td,th{padding-right:.5rem}}
"""
# Figures are drawn when they come near the window, with the page's own colours, and anew when those change.
_SCRIPT = """
const css=n=>getComputedStyle(document.documentElement).getPropertyValue(n).trim();
const narrow=()=>window.innerWidth<640;
function themed(){const axis={gridcolor:css('--line'),zerolinecolor:css('--line'),linecolor:css('--line')};
return {paper_bgcolor:'rgba(0,0,0,0)',plot_bgcolor:'rgba(0,0,0,0)',font:{color:css('--ink'),family:'system-ui,sans-serif',
size:narrow()?11:13},hoverlabel:{align:'left',bgcolor:css('--raised'),bordercolor:css('--line'),font:{color:css('--ink'),
size:12}},axis}}
function draw(el){const spec=JSON.parse(el.querySelector('script').textContent),t=themed(),layout=spec.layout;
for(const key of Object.keys(layout))if(/^[xy]axis/.test(key))Object.assign(layout[key],t.axis,{automargin:true});
delete t.axis;Object.assign(layout,t);
if(narrow()&&layout.showlegend){layout.legend={orientation:'h',x:0,y:-75/((layout.height||400)-75),yanchor:'top'};
layout.height=(layout.height||400)+22*Math.ceil(spec.data.filter(d=>d.showlegend!==false).length/2)}
el.style.minHeight='';Plotly.newPlot(el.firstElementChild,spec.data,layout,{responsive:true,displaylogo:false,
displayModeBar:narrow()?false:undefined}).then(()=>{el.dataset.drawn='1'})}
const figures=[...document.querySelectorAll('.figure')];
const seen=new IntersectionObserver(entries=>{for(const e of entries)if(e.isIntersecting){seen.unobserve(e.target);
draw(e.target)}},{rootMargin:'600px'});
figures.forEach(el=>seen.observe(el));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change',()=>figures.filter(f=>f.dataset.drawn).forEach(draw));
"""


class Html(str):
    """Text that is HTML already."""


def escape(text: Any) -> Html:
    """Anything as HTML."""
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))


def join(parts: Iterable[Html]) -> Html:
    """Pieces in order."""
    return Html("".join(parts))


def paragraph(text: Any, kind: str = "") -> Html:
    """A paragraph; kind "soft" or "warn"."""
    return Html(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")


def preformatted(text: str) -> Html:
    """Text with its own lines."""
    return Html(f"<pre>{escape(text)}</pre>")


def facts(pairs: dict[str, Any]) -> Html:
    """A few numbers that a reader looks for first."""
    cells = "".join(f"<div>{escape(name)}<b>{escape(value)}</b></div>" for name, value in pairs.items())
    return Html(f'<div class="facts">{cells}</div>')


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]], text: Sequence[int] = ()) -> Html:
    """A table that scrolls by itself where it is wider than the page; columns in `text` are left-aligned and wrap."""

    def cells(kind: str, row: Sequence[Any]) -> str:
        return "".join(
            f'<{kind} class="text">{escape(cell)}</{kind}>' if i in text else f"<{kind}>{escape(cell)}</{kind}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return Html(f'<div class="wide"><table><thead><tr>{cells("th", header)}</tr></thead><tbody>{body}</tbody></table></div>')


def details(summary: Any, content: Html, is_open: bool = False) -> Html:
    """What opens at a click."""
    return Html(f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>")


def figure(traces: list[Trace], height: int = 380, **layout: Any) -> Html:
    """A plotly figure.

    Args:
        traces: plotly's, with numbers as arrays or lists; what is not finite is left out of the picture.
        height: pixels.
        layout: plotly's; axes that are not named get none of the page's colours.
    """
    everything: dict[str, Any] = {
        "height": height, "margin": {"l": 50, "r": 15, "t": 30, "b": 45}, "xaxis": {}, "yaxis": {}, "hovermode": "closest",
        **layout,
    }
    text = json.dumps({"data": _plain(traces), "layout": _plain(everything)}, separators=(",", ":"), ensure_ascii=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return Html(
        f'<div class="figure" style="min-height:{height}px"><div></div>'
        f'<script type="application/json">{safe}</script></div>'
    )


def shorten(text: str, most: int) -> str:
    """The first characters of a text; fewer of scripts that take three bytes for each, so that pages stay small."""
    return text[:most].encode("utf-8", "replace")[: 3 * most // 2].decode("utf-8", "ignore")


def hover_text(text: str, most: int = 240, width: int = 70) -> str:
    """A sample's text for plotly's hover label: its beginning, in short lines, with what would be markup escaped."""
    cut = shorten(text, most)
    cut += "…" if len(text) > len(cut) else ""
    lines = [line[i : i + width] for line in cut.splitlines() for i in range(0, max(len(line), 1), width)]
    return "<br>".join(html.escape(line, quote=False) for line in lines[:10])


def document(title: str, lead: Html, sections: Sequence[tuple[str, Html]]) -> str:
    """The whole page.

    Args:
        title: its heading.
        lead: under it.
        sections: heading and content of each.
    """
    from plotly.offline import get_plotlyjs

    headings = [(f"s{i}", name, content) for i, (name, content) in enumerate(sections)]
    links = "".join(f'<a href="#{key}">{escape(name)}</a> ' for key, name, _ in headings)
    body = "".join(f'<section id="{key}"><h2>{escape(name)}</h2>{content}</section>' for key, name, content in headings)
    has_figures = 'class="figure"' in body + lead
    scripts = f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script>" if has_figures else ""
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{lead}"
        f'<nav class="soft">{links}</nav>{body}{scripts}</body></html>\n'
    )


def _plain(value: Any) -> Any:
    """As JSON has it: arrays as lists, numbers to five digits, what is not finite as null."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
