import math

from specgrad.pages import Column, Section, checks, details, plot, render_page, settings, table, text


def test_whatever_a_user_names_his_layers_is_escaped():
    evil = "<script>alert('x')</script>"
    blocks = [
        text(evil), settings({evil: evil}), details(evil, [evil]), checks([(False, evil, evil)]),
        table([Column(evil), Column("verdict", classed=True)], [(evil, evil)], sortable=True),
    ]  # fmt: skip
    page = render_page(evil, [evil], [Section(evil, blocks)])
    assert evil not in page
    assert "&lt;script&gt;" in page


def test_numbers_are_shown_rounded_and_sorted_exactly():
    got = table([Column("value", 1)], [(1234.56,), (math.nan,)], sortable=True)
    assert 'data-sort="1234.56">1,234.6<' in got
    assert ">–<" in got


def test_identifiers_of_two_drawings_in_one_page_do_not_clash():
    svg = '<?xml version="1.0"?><svg><clipPath id="p1"/><g clip-path="url(#p1)"/><use xlink:href="#m2"/></svg>'
    first, second = plot(svg, "First drawing"), plot(svg, "Second drawing")
    assert 'id="first-drawing-p1"' in first
    assert "url(#first-drawing-p1)" in first
    assert 'href="#first-drawing-m2"' in first
    assert 'id="second-drawing-p1"' in second
    assert "<?xml" not in first
