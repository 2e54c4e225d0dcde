"""Which random mutants a seed selects."""

from mutants import sampled
from mutants.sampled import universe


def drawn(seed: int, without: int = -1) -> list[str]:
    sites = [site for number, site in enumerate(universe()) if number != without]
    return [repr(site) for site in sorted(sites, key=lambda site: sampled._draw(seed, site))]


def test_a_seed_selects_the_same_mutants_after_an_edit() -> None:
    first = drawn(1)
    gone = repr(universe()[5])
    assert drawn(1, without=5) == [site for site in first if site != gone]


def test_another_seed_selects_others() -> None:
    assert drawn(1)[:100] != drawn(2)[:100]
    assert sorted(drawn(1)) == sorted(drawn(2))
