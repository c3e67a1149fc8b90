"""``specgrad cite``."""

import re
from importlib.resources import files

from specgrad.figures._figure import load_figure


def citations() -> dict[str, str]:
    """BibTeX entries by key."""
    content = (files("specgrad") / "assets" / "citations.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{([^,]+),.*?^\}", content, flags=re.MULTILINE | re.DOTALL)
    texts = [match.group(0) for match in re.finditer(r"^@\w+\{.*?^\}", content, flags=re.MULTILINE | re.DOTALL)]
    return dict(zip(entries, texts, strict=True))


def do_cite(name: str) -> int:
    """Prints the entries of a figure's paper and further works, and of this package; without a name, all entries."""
    entries = citations()
    if name:
        figure = load_figure(name)
        keys = [figure.PAPER, *getattr(figure, "CITES", ()), "specgrad"]
    else:
        keys = list(entries)
    print("\n\n".join(entries[key] for key in dict.fromkeys(keys)))
    return 0
