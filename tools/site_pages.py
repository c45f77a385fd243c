"""Make README.md and CONTRIBUTING.md pages of the site: mkdocs.yml names this file as a hook."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the two pages to those of docs/."""
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=page_of_site(text, Path(source))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of the pages in docs/ that leave it."""
    source = page.file.src_uri
    return markdown if source in PAGES else page_of_site(markdown, Path("docs") / source)


def page_of_site(text: str, source: Path) -> str:
    """Return the text with its links as the site has them; a link to a file that is not a page becomes plain text."""

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        wanted = (ROOT / source.parent / path).resolve().relative_to(ROOT)
        if wanted.parts[0] == "docs":
            path = wanted.relative_to("docs").as_posix()
        else:
            page = next((name for name, file in PAGES.items() if file == wanted.as_posix()), None)
            if page is None:
                return words
            path = page
        return f"{picture}[{words}]({path}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, text)
