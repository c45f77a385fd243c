"""Puts a report together: the template, the data and the library of charts in one file that loads nothing.

Texts of runs are never a part of the page's markup. They are JSON, either packed or with every character escaped that
could end their element. The script puts them into the page as text.
"""

import base64
import gzip
import hashlib
import importlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from megatron_rl.errors import PlatformError

# Markup, style and scripts. A script uses definitions of those before it.
PARTS = (
    "page.html", "page.css", "elements.js", "curves.js", "overview.js", "trace.js", "rollouts.js", "page.js",
)  # fmt: skip
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
# The level of compression. Higher ones take twice as long and save a hundredth.
_LEVEL = 6


def load_library() -> str:
    """Return the scripts of Bokeh, which draws the charts."""
    try:
        module = importlib.import_module("bokeh.resources")
    except ImportError as error:
        raise PlatformError(
            f"the report's charts need Bokeh, which does not load ({error}): pip install bokeh"
        ) from error
    scripts: list[str] = module.Resources(mode="inline", components=["bokeh", "bokeh-api"], minified=True).js_raw
    return ";\n".join(scripts)


def build_page(library: str, summary: Any = None, rollouts: Sequence[Any] = ()) -> str:
    """Build the page; without a summary it asks its server for all data."""
    template, style, *scripts = (read_part(name) for name in PARTS)
    # The hash covers all text between the element's tags.
    script = f"\n{''.join(scripts)}"
    connect = "'self'" if summary is None else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(script)} {_hash(library)}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    data = [_element("library", pack_text(library))]
    if summary is not None:
        data.append(_element("summary", pack(summary)))
        data += [_element(f"rollouts-{number}", pack(of_run)) for number, of_run in enumerate(rollouts)]
    for place, text in (
        ("{policy}", policy), ("{style}\n", style), ("\n{script}\n", script), ("<!-- data -->", "\n".join(data)),
    ):  # fmt: skip
        template = template.replace(place, text, 1)
    return template


def read_part(name: str) -> str:
    """Read a file that is part of the page."""
    return resources.files(__package__).joinpath("parts", name).read_text(encoding="utf-8")


def pack(data: Any) -> str:
    """Write data as JSON, compressed, in letters without a meaning in HTML."""
    return pack_text(write_json(data))


def pack_text(text: str) -> str:
    return base64.b64encode(compress(text)).decode("ascii")


def compress(text: str) -> bytes:
    # Without the time, equal data give equal bytes. Half of a surrogate pair becomes a question mark.
    return gzip.compress(text.encode("utf-8", "replace"), _LEVEL, mtime=0)


def write_json(data: Any) -> str:
    """Write JSON that is safe inside a script element."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _element(name: str, text: str) -> str:
    return f'<script type="text/plain" id="{name}">{text}</script>'


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
